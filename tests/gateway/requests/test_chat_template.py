"""A configured chat template replaces the model's."""

from pathlib import Path

import pytest

from foretoken.running.options import demo_model
from gateway.requests.text import Text
from services.runtime.config import ConfigError


def test_configured_chat_template_renders_conversations(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    text = Text(demo_model(), str(file))
    turns = [{"role": "user", "content": "red"}, {"role": "user", "content": "blue"}]
    assert text.decode(text.encode_chat(turns)) == "red!blue!"
    assert text.encode_chat(turns) != Text(demo_model()).encode_chat(turns)


def test_unreadable_chat_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"gateway.chat_template: /no/such cannot be read"):
        Text(demo_model(), "/no/such")

"""User presets: rows in addition to the built-in ones, with the same checks."""

from pathlib import Path

import pytest

from services.policies.preset import CHOICES, choose, load_preset_rows, presets

WHOLE = "\n".join(
    f'{key} = "{value}"' for key in CHOICES for value in [getattr(choose("fcfs"), key)]
)


def read(folder: Path, text: str) -> str:
    file = folder / "mine.toml"
    file.write_text(text)
    return str(file)


def test_preset_has_about_and_source() -> None:
    for name, row in load_preset_rows().items():
        preset = row.preset
        assert preset == presets()[name]
        assert preset.about and preset.source and "\n" not in preset.about
        assert row.given <= set(preset.params)


def test_user_preset_inherits_from_like(tmp_path: Path) -> None:
    """A parameter used only by a replaced choice is dropped, as with --set."""
    file = read(
        tmp_path,
        '[mine]\nlike = "alise"\nresidency = "cost"\nparams = { ageing_s = 3 }\n'
        '[plain]\nlike = "mine"\norder = "arrival"\nabout = "Without queues"\nsource = "me"\n',
    )
    known = load_preset_rows(file)
    assert [*known] == [*presets(), "mine", "plain"]
    alise, mine, plain = (known[name].preset for name in ("alise", "mine", "plain"))
    assert {key for key in CHOICES if getattr(mine, key) != getattr(alise, key)} == {"residency"}
    assert mine.params == {**alise.params, "ageing_s": 3.0}
    assert (mine.name, mine.about, mine.source) == ("mine", "like alise", file)
    assert (plain.order, plain.residency, plain.about) == ("arrival", "cost", "Without queues")
    assert plain.params == {"watermark": 0.95, "slice_tokens": 32}
    assert plain.source == "me" and known["plain"].given == {"watermark", "slice_tokens"}
    assert choose("plain", {"watermark": 0.5}, presets(file)).params["watermark"] == 0.5


def test_user_preset_may_be_complete(tmp_path: Path) -> None:
    preset = presets(read(tmp_path, f"[mine]\n{WHOLE}\n"))["mine"]
    assert preset.params == {"watermark": 0.95} and preset.order == "arrival"
    assert not load_preset_rows(read(tmp_path, f"[mine]\n{WHOLE}\n"))["mine"].given


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[fcfs]\nlike = "alise"', r'\[fcfs\]: the name exists; .* like = "fcfs" in it'),
        ('[x]\nlike = "alice"', r"\[x\]: unknown row 'alice', did you mean alise\?"),
        ('[x]\nlike = "y"\n[y]\nlike = "fcfs"', r"\[x\]: unknown row 'y'"),
        ('[x]\nlike = "fcfs"\nplaice = "y"', "unknown cell 'plaice', did you mean place"),
        ('[x]\nlike = "fcfs"\nname = "y"', "unknown cell 'name'"),
        ('[x]\nlike = "fcfs"\nform = 3', "form must be a string, got 3"),
        ('[x]\nlike = "fcfs"\nparams = 3', "params must be a table, got 3"),
        ('[x]\nlike = "fcfs"\nparams = { watermark = 2 }', "watermark must lie in"),
        ('[x]\nlike = "fcfs"\nparams = { levels = 2 }', "levels is a number of preset.order=alise"),
        (
            '[x]\nlike = "fcfs"\nbatch_mode = "static"',
            "batch_mode=static needs preset.arrangement=batch",
        ),
        ('[x]\norder = "arrival"', 'predictor, .* missing; give all choices, or like = "ROW"'),
        ("x = 3", r"\[x\]: must be a table"),
        ("[x", "is not valid TOML: "),
    ],
)
def test_invalid_user_preset_is_rejected_with_row_name(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = read(tmp_path, text)
    with pytest.raises(ValueError, match=sentence) as raised:
        load_preset_rows(file)
    assert str(raised.value).startswith(file)


def test_missing_preset_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read presets from .*none.toml: No such file"):
        load_preset_rows(str(tmp_path / "none.toml"))

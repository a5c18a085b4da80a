"""The models that `foretoken serve` is given."""

from pathlib import Path

import pytest

from foretoken.commands.model_arguments import (
    AskedModel,
    check_several,
    find_models,
    read_models,
)
from foretoken.commands.usage import UsageError
from foretoken.running.options import demo_model


@pytest.mark.parametrize(
    ("given", "option", "models"),
    [
        ([], "", []),
        (["org/a"], "", [AskedModel("org/a")]),
        ([], "org/a", [AskedModel("org/a")]),
        (["org/a"], "org/a", [AskedModel("org/a")]),
        (["x=org/a", "org/b"], "", [AskedModel("org/a", "x"), AskedModel("org/b")]),
        (["x=./a=b"], "", [AskedModel("./a=b", "x")]),
    ],
)
def test_arguments_name_models(given: list[str], option: str, models: list[AskedModel]) -> None:
    assert read_models(given, option, "") == models


def test_folder_with_an_equals_sign_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "lr=1"
    folder.mkdir()
    assert read_models([str(folder)], "", "tuned") == [AskedModel(str(folder))]


@pytest.mark.parametrize(
    ("given", "option", "served_name", "sentence"),
    [
        (["a", "b"], "b", "", "two models are given, a and --model b; give one"),
        (["a", "b"], "", "c", "--served-model-name is for one model without a name of its own"),
        (["x=a"], "", "c", "--served-model-name is for one model without a name of its own"),
        (["=a"], "", "", "write NAME=MODEL, or a model alone; got '=a'"),
    ],
)
def test_mistake_is_one_sentence(
    given: list[str], option: str, served_name: str, sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_models(given, option, served_name)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("cluster", "gateways", "backends", "sentence"),
    [
        ("", 0, [], "several models need a gateway process: give --gateways 1 or more"),
        ("ray", None, [], "--cluster is for one model: start `foretoken serve` for each model"),
        ("", 2, ["http://a:1"], "--backend is for one model: start `foretoken serve` for each"),
    ],
)
def test_options_of_one_model(
    cluster: str, gateways: int | None, backends: list[str], sentence: str
) -> None:
    check_several("", None, [])
    with pytest.raises(UsageError) as caught:
        check_several(cluster, gateways, backends)
    assert str(caught.value).startswith(sentence)


def test_several_models_have_distinct_names() -> None:
    asked = [AskedModel(demo_model()), AskedModel(demo_model(), "second")]
    assert [each.name for each in find_models(asked, weights=True)] == ["demo", "second"]
    assert [each.name for each in find_models(asked[:1], weights=True)] == [""]  # the folder's
    with pytest.raises(UsageError, match="two models have the name demo; write NAME=MODEL"):
        find_models([asked[0], asked[0]], weights=True)

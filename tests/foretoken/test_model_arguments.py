"""The models that `foretoken serve` is given, and the status lines of several."""

from pathlib import Path

import pytest

from foretoken.commands.model_arguments import (
    AskedModel,
    check_several,
    find_models,
    read_models,
)
from foretoken.commands.usage import UsageError
from foretoken.running.console.fleets import merge_fleets
from foretoken.running.console.status import format_fleet, ready_line
from foretoken.running.options import ServeOptions, demo_model, model_sections, sections
from protos.generated import scheduler_pb2


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


def test_every_model_has_all_options() -> None:
    options = ServeOptions(served_model_name="a", kv_tokens=512, more_models=[("b", "/models/b")])
    first, second = model_sections(options)
    assert first == sections(ServeOptions(served_model_name="a", kv_tokens=512))
    assert second["worker"] == {"model": "/models/b", "kv_tokens": "512"}
    assert second["gateway"]["served_model_name"] == "b"


def fleet(model: str, running: int, queued: int, drain_s: float) -> scheduler_pb2.FleetView:
    worker = scheduler_pb2.WorkerInfo(
        model=model,
        kv_tokens=100,
        held_tokens=50,
        running=running,
        placement="float32",
        start="1 s",
    )
    return scheduler_pb2.FleetView(
        workers=[worker], queued=queued, drain_s=drain_s, policy="foretoken"
    )


def test_status_of_several_models_is_one_line() -> None:
    fleets = [fleet("a", 1, 2, 3.0), fleet("b", 4, 5, 1.0)]
    assert merge_fleets(fleets[:1]) == fleets[0]
    line = format_fleet(merge_fleets(fleets))
    assert line == "5 running · 7 waiting · KV 50% · 2 worker(s) · drains in 3 s"
    ready = ready_line(fleets, "http://h:1", "h:2")
    each = "float32, 1 worker(s) with 100 KV tokens each"
    assert ready.startswith(f"foretoken is ready: a, {each}; b, {each}, policy foretoken, started")
    assert ready.endswith("HTTP http://h:1, gRPC h:2")

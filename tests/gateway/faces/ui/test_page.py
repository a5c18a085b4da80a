"""The live page over HTTP: files, headers, board data and request stories."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path

import pytest

from foretoken.running.options import ServeOptions, sections
from gateway.config import GatewayConfig
from gateway.faces.static import MEDIA_TYPES
from gateway.faces.ui import board as board_module
from protos.generated import scheduler_pb2 as sched
from services.policies.preset import presets
from services.runtime.config import load
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

PAGE = Path(str(files("gateway.faces.ui").joinpath("page")))
NAMES = sorted(entry.name for entry in PAGE.iterdir())


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of("12345")) as running:
        yield running


async def test_page_files_have_media_type_and_security_headers(harness: Harness) -> None:
    assert {Path(name).suffix for name in NAMES} == set(MEDIA_TYPES)
    for name in NAMES:
        reply = await harness.http("GET", f"/ui/{name}")
        assert reply.status == 200
        assert reply.text == (PAGE / name).read_text()
        assert reply.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
        assert reply.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-cache"
    index = await harness.http("GET", "/ui/")
    assert index.text == (PAGE / "index.html").read_text()


async def test_page_file_is_not_sent_again_for_a_known_etag(harness: Harness) -> None:
    first = await harness.http("GET", "/ui/page.js")
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}', "*"):
        again = await harness.http("GET", "/ui/page.js", headers={"if-none-match": known})
        assert (again.status, again.text, again.headers["etag"]) == (304, "", tag)
    changed = await harness.http("GET", "/ui/page.js", headers={"if-none-match": '"other"'})
    assert (changed.status, changed.text) == (200, first.text)
    assert (await harness.http("GET", "/ui/style.css")).headers["etag"] != tag
    head = await harness.http("HEAD", "/ui/page.js")
    assert (head.status, head.text, head.headers["etag"]) == (200, "", tag)
    assert int(head.headers["content-length"]) == len(first.text.encode())


@pytest.mark.parametrize(
    "path",
    [
        "/ui/nothing.js", "/ui/../config.py", "/ui/..%2froutes.py", "/ui/%2e%2e/routes.py",
        "/ui/%2e%2e%2froutes.py", "/ui/..%5croutes.py", "/ui/.", "/ui/..", "/ui/page/index.html",
        "/ui//index.html", "/ui/index.html%00", "/ui/%2fetc%2fpasswd", "/ui/why", "/ui/why/a/b",
        "/uix",
    ],
)  # fmt: skip
async def test_paths_outside_the_page_are_404(harness: Harness, path: str) -> None:
    reply = await harness.http("GET", path, headers={"accept": "text/html"})
    assert reply.status == 404
    assert reply.json["error"]["type"] == "invalid_request_error"


async def test_root_redirects_browsers_to_the_page(harness: Harness) -> None:
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path, headers in (("/", browser), ("/ui", {})):
        reply = await harness.http("GET", path, headers=headers)
        assert (reply.status, reply.headers["location"]) == (307, "ui/")
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        reply = await harness.http("GET", "/", headers=headers)
        assert (reply.status, reply.json["ui"], reply.headers["vary"]) == (200, "/ui/", "accept")


async def test_page_paths_refuse_post(harness: Harness) -> None:
    for path in ("/ui/", "/ui/page.js", "/ui/board", "/ui/about", "/ui/why/abcd"):
        assert (await harness.http("POST", path, {})).status == 405


async def test_disabled_page_has_no_paths() -> None:
    assert load(GatewayConfig, {"ui": "off"}).ui is False
    async with run_harness(lambda _: tokens_of("1"), ui=False) as harness:
        for path in ("/ui", "/ui/", "/ui/page.js", "/ui/board", "/ui/about", "/ui/why/abcd"):
            reply = await harness.http("GET", path, headers={"accept": "text/html"})
            assert reply.status == 404
        browser = {"accept": "text/html"}
        assert (await harness.http("GET", "/", headers=browser)).headers["location"] == "docs"
        assert "ui" not in (await harness.http("GET", "/")).json
        assert (await harness.http("GET", "/health")).status == 200
        assert harness.scheduler.fleet_queries == 0


def test_command_line_option_disables_the_page() -> None:
    assert sections(ServeOptions(ui=False))["gateway"]["ui"] == "off"
    assert "ui" not in sections(ServeOptions())["gateway"]


def test_page_files_reference_no_other_server() -> None:
    for name in NAMES:
        text = (PAGE / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\bsrc=.//|@import|eval\(|innerHTML", text), name


async def test_openapi_does_not_list_page_paths(harness: Harness) -> None:
    paths = (await harness.http("GET", "/openapi.json")).json["paths"]
    assert "/v1/chat/completions" in paths
    assert not [path for path in paths if path.startswith("/ui")]


async def test_about_has_model_classes_and_presets(harness: Harness) -> None:
    reply = await harness.http("GET", "/ui/about")
    assert reply.headers["cache-control"] == "no-store"
    content = reply.json
    assert (content["model"], content["default_class"]) == ("demo", "standard")
    assert content["max_context_tokens"] == 512
    assert content["classes"] == {
        "interactive": {"ttft_s": 1.0, "tpot_s": 0.05, "mtpot_s": 0.5},
        "standard": {"ttft_s": 5.0, "tpot_s": 0.1, "mtpot_s": 1.5},
        "batch": {"ttft_s": None, "tpot_s": None, "mtpot_s": None},
    }
    assert [each["name"] for each in content["presets"]] == list(presets())
    assert all(each["about"] for each in content["presets"])


def view(held: int, workers: int = 1) -> sched.FleetView:
    infos = [
        sched.WorkerInfo(
            worker_id=f"worker-{number}", model="demo", kv_tokens=512, held_tokens=held,
            running=2, block_tokens=16,
        )
        for number in range(workers)
    ]  # fmt: skip
    return sched.FleetView(workers=infos, queued=3, policy="foretoken", drain_s=float("inf"))


async def test_board_shows_fleet_and_queue(harness: Harness) -> None:
    harness.scheduler.view = view(held=128)
    reply = await harness.http("GET", "/ui/board")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["cache-control"] == "no-store"
    content = json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content.pop("age_s") >= 0
    assert content == {
        "ready": True, "draining": False, "preset": "foretoken", "queued": 3, "running": 2,
        "live": 0, "arriving": 0, "drain_s": None, "worker_count": 1, "window_s": 60, "classes": {},
        "workers": [{
            "id": "worker-0", "model": "demo", "running": 2, "kv_tokens": 512,
            "held_tokens": 128, "block_tokens": 16,
        }],
    }  # fmt: skip


async def test_board_counts_answers_by_class(harness: Harness) -> None:
    for name, tokens in (("batch", 5), ("ttft_s=1e-9", 2)):
        body = {"prompt": "1,", "max_tokens": tokens}
        reply = await harness.http("POST", "/v1/completions", body, {"x-foretoken-sla": name})
        assert reply.status == 200
    classes = (await harness.http("GET", "/ui/board")).json["classes"]
    assert classes["batch"] == {"met": 1, "missed": {}, "tokens": 5, "good_tokens": 5}
    custom = classes["custom"]
    assert (custom["met"], custom["tokens"], custom["good_tokens"]) == (0, 2, 0)
    assert list(custom["missed"].values()) == [1]
    assert set(custom["missed"]) <= {"queued", "prefill"}


async def test_board_viewers_share_one_snapshot(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "REFRESH_S", 3600.0)
    looks = await asyncio.gather(*(harness.http("GET", "/ui/board") for _ in range(20)))
    assert {look.text for look in looks} == {looks[0].text}
    assert harness.scheduler.fleet_queries == 1


async def test_board_lists_a_limited_number_of_workers(harness: Harness) -> None:
    harness.scheduler.view = view(held=1, workers=300)
    content = (await harness.http("GET", "/ui/board")).json
    assert (content["worker_count"], len(content["workers"])) == (300, 256)
    assert content["running"] == 600


async def test_board_shows_the_last_answer_of_a_lost_scheduler(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "REFRESH_S", 0.0)
    harness.scheduler.view = view(held=128)
    assert (await harness.http("GET", "/ui/board")).json["age_s"] < 60
    await harness.scheduler_server.stop(0)
    await harness.until(lambda: not harness.gateway.ready)
    first = (await harness.http("GET", "/ui/board")).json
    await asyncio.sleep(0.01)  # ages are in milliseconds
    second = (await harness.http("GET", "/ui/board")).json
    assert (first["preset"], first["ready"]) == ("foretoken", False)
    assert 0 < first["age_s"] < second["age_s"]


async def test_board_has_no_age_before_the_first_scheduler_answer() -> None:
    async with run_harness(with_worker=False) as harness:
        await harness.scheduler_server.stop(0)
        content = (await harness.http("GET", "/ui/board")).json
        assert (content["age_s"], content["workers"], content["preset"]) == (None, [], "")


async def test_story_ends_with_the_gateway_s_sla_result(harness: Harness) -> None:
    body = {"prompt": "1,", "max_tokens": 5}
    reply = await harness.http("POST", "/v1/completions", body, {"x-foretoken-sla": "batch"})
    choice = reply.json["id"].removeprefix("cmpl-") + "-0"
    placed = sched.Chapter(at_s=0.0, kind="placed", text="admitted", times=3, until_s=0.5)
    harness.scheduler.stories["some-id"] = sched.Story(request_id=choice, chapters=[placed])
    reply = await harness.http("GET", "/ui/why/some-id")
    assert (reply.status, reply.headers["cache-control"]) == (200, "no-store")
    (story,) = reply.json["stories"]
    assert (story["request_id"], story["live"]) == (choice, False)
    first, last = story["chapters"]
    assert first == {
        "at_s": 0.0, "kind": "placed", "text": "admitted", "times": 3, "until_s": 0.5,
    }  # fmt: skip
    assert last["kind"] == "judged"
    assert last["text"].startswith("as its client saw it, SLA batch met; first token after ")


async def test_unknown_request_id_is_404(harness: Harness) -> None:
    reply = await harness.http("GET", "/ui/why/nosuchid")
    assert reply.status == 404
    assert reply.json["error"] == {
        "message": "no request 'nosuchid' is remembered", "type": "invalid_request_error",
        "param": "request_id", "code": "request_not_found",
    }  # fmt: skip


async def test_too_long_request_id_is_400(harness: Harness) -> None:
    reply = await harness.http("GET", f"/ui/why/{'x' * 129}")
    assert (reply.status, reply.json["error"]["param"]) == (400, "request_id")

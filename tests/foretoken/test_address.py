"""`--server` takes an HTTP address, a gRPC address, or a bare one, and detects its protocol; API
keys of a live server."""

import subprocess
from collections.abc import Iterator

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from foretoken import Client
from foretoken.client.address import GrpcAddress, HttpAddress, resolve_server
from gateway.types.api_keys import name_keys
from tests.foretoken.bench.openai_fake import ScriptedAnswer, fake_server
from tests.live import ROOT, Live, command, environment, serving

KEYS = ("secret-1", "secret-2", "secret-3", "secret-4")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://h:8000/v1", HttpAddress("h", 8000)),
        ("https://h/base", HttpAddress("h", 443, "/base", secure=True)),
        ("grpc://h:50051", GrpcAddress("h:50051")),
        ("grpc://[::1]:50051", GrpcAddress("[::1]:50051")),
        ("unix:/run/foretoken.sock", GrpcAddress("unix:/run/foretoken.sock")),
        ("127.0.0.1:1", GrpcAddress("127.0.0.1:1")),
    ],
)
def test_resolve_server_parses_each_form(text: str, address: HttpAddress | GrpcAddress):
    assert resolve_server(text) == address


@pytest.mark.parametrize("text", ["", "ftp://h:1", "h:port", "http://", "grpc://"])
def test_resolve_server_rejects_other_text_with_examples(text: str):
    with pytest.raises(ValueError, match=r"is not a server address; examples: http://"):
        resolve_server(text)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("h:50051", "h:50051"),
        ("grpc://h:50051", "h:50051"),
        ("unix:/run/foretoken.sock", "unix:/run/foretoken.sock"),
    ],
)
def test_client_accepts_each_form_of_a_grpc_address(text: str, target: str):
    with Client(text) as client:
        assert client.address == target


def test_client_rejects_an_http_address():
    with pytest.raises(ValueError, match="is not a gRPC address; pass the host:port"):
        Client("http://h:8000")


async def test_bare_address_of_an_http_server_is_detected():
    import asyncio

    async with fake_server(lambda _: ScriptedAnswer()) as fake:
        bare = fake.url.removeprefix("http://")
        address = await asyncio.to_thread(resolve_server, bare)
    assert address == HttpAddress.parse(fake.url)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    keys = [option for key in KEYS for option in ("--api-key", key)]
    sharing = ",".join(each.name for each in name_keys(KEYS[2:]))
    with serving(*keys, "--set", f"gateway.shared_prefixes={sharing}") as system:
        yield system


@pytest.mark.slow
def test_every_form_of_a_live_server_with_a_key_works_in_each_command(live: Live):
    def run(*arguments: str, text: str = "", key: str = KEYS[0]) -> tuple[int, str, str]:
        variables = environment() | {"FORETOKEN_API_KEY": key}
        done = subprocess.run(
            command(*arguments), input=text, capture_output=True, text=True, timeout=60,
            env=variables, cwd=ROOT,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    client = OpenAI(base_url=f"{live.http}/v1", api_key=KEYS[0])
    question = [ChatCompletionUserMessageParam(role="user", content="Count from 1 to 3.")]
    answer_id = client.chat.completions.create(model="demo", messages=question).id
    forms = (live.http, live.http.removeprefix("http://"), live.grpc, f"grpc://{live.grpc}")
    for form in forms:
        status, out, notes = run(
            "chat", "--server", form, "--temperature", "0", text="Reverse: red blue green\n"
        )
        assert (status, out.strip()) == (0, "green blue red"), notes
        assert form in notes and ">" not in out
        status, out, notes = run("why", answer_id, "--server", form)
        assert status == 0 and "times in seconds since its arrival" in out, notes
        status, out, notes = run("why", answer_id, "--server", form, key="wrong")
        assert status == 1 and not out and "key" in notes.lower()
        status, out, notes = run("bench", "--server", form, "--requests", "2")
        assert status == 0 and "2 of 2" in out, notes
        status, out, notes = run("bench", "--server", form, key="wrong")
        assert status == 2 and not out and "rejects the API key" in notes


@pytest.mark.slow
def test_cached_prefixes_are_those_of_a_key_unless_it_shares(live: Live):
    prompt = "Copy: " + " ".join(["red blue green"] * 12) + "\n"

    def cached(key: str, salt: str = "") -> int:
        client = OpenAI(base_url=f"{live.http}/v1", api_key=key, max_retries=0)
        answer = client.completions.create(
            model="demo", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    first, second, sharing, with_it = KEYS
    assert cached(first) == 0
    assert cached(first) > 0
    assert cached(second) == 0
    assert cached(sharing) == 0
    assert cached(with_it) > 0
    assert cached(first, "mine") == 0
    assert cached(second, "mine") == 0
    assert cached(first, "mine") > 0
    for key, salt, known in ((second, "", True), (with_it, "mine", False), (first, "mine", True)):
        with Client(live.grpc, api_key=key) as client:
            usage = client.complete(prompt, max_tokens=1, cache_salt=salt).usage
            assert (usage.cached_tokens > 0) == known

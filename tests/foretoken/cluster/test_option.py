"""The option `--cluster` of `foretoken serve`."""

import pytest

from foretoken.commands import serve
from foretoken.commands.usage import UsageError
from foretoken.running.cluster.places import CLUSTERS
from foretoken.running.options import ServeOptions, sections
from foretoken.running.supervised import worker_to_place
from services.worker.config import WorkerConfig


def test_unknown_name_is_one_sentence():
    with pytest.raises(UsageError, match=r"^--cluster takes ray; got 'slurm'$"):
        serve.serve(cluster="slurm")


def test_cluster_needs_a_gateway_process():
    with pytest.raises(UsageError, match=r"^--cluster needs a gateway process"):
        serve.serve(cluster="ray", gateways=0)


def test_other_servers_need_no_cluster():
    with pytest.raises(UsageError, match=r"^leave out --cluster with --engine openai: other serv"):
        serve.serve(cluster="ray", gateways=1, engine="openai", backend=["http://127.0.0.1:9"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ServeOptions(device="cuda"), {"device": "cuda"}),
        (ServeOptions(emulate="h100-llama3-8b"), {"device": "cpu"}),  # no GPU is reserved
        (
            ServeOptions(engine="vllm", sets=['worker.vllm_args={"seed": 1}']),
            {"device": "auto", "vllm_args": {"seed": 1}},
        ),
    ],
)
def test_place_is_for_the_engine(options: ServeOptions, expected: dict[str, object]):
    worker = worker_to_place(options, sections(options))
    assert {name: getattr(worker, name) for name in expected} == expected


async def test_workers_are_here_without_a_cluster():
    async with CLUSTERS[""](WorkerConfig(), 2) as places:
        assert (list(places.workers), places.scheduler) == ([], {})

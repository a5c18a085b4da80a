"""The option `--cluster` of `foretoken serve`."""

import pytest

from foretoken.commands import serve
from foretoken.commands.usage import UsageError
from foretoken.running.cluster.places import CLUSTERS
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


async def test_workers_are_here_without_a_cluster():
    async with CLUSTERS[""](WorkerConfig(), 2) as places:
        assert (list(places.workers), places.scheduler) == ([], {})

"""The option `--cluster` of `foretoken serve`."""

import pytest

from foretoken.commands import serve
from foretoken.commands.usage import UsageError
from foretoken.running.cluster.places import CLUSTERS


def test_names_are_those_that_have_places():
    assert {"", *serve.CLUSTERS} == set(CLUSTERS)


def test_unknown_name_is_one_sentence():
    with pytest.raises(UsageError, match=r"^--cluster takes ray; got 'slurm'$"):
        serve.serve(cluster="slurm")


def test_cluster_needs_a_gateway_process():
    with pytest.raises(UsageError, match=r"^--cluster needs a gateway process"):
        serve.serve(cluster="ray", gateways=0)


async def test_workers_are_here_without_a_cluster():
    async with CLUSTERS[""]({}, 2) as places:
        assert (list(places.workers), places.scheduler) == ([], {})

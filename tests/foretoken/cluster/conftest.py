"""A Ray cluster of two nodes on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ray.cluster_utils import Cluster

from tests.live import ROOT

CPUS = 2  # of each node


@contextmanager
def _two_nodes() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # of the nodes
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS})
        try:
            made.add_node(num_cpus=CPUS)
            made.wait_for_nodes()
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of this test, which may remove a node."""
    with _two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    with _two_nodes() as made:
        yield made

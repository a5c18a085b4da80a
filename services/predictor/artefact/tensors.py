"""Serialises a ranker as named tensors and a JSON description, so that no file contains code."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from services.predictor.models.nets.crossfit import Ensemble
from services.predictor.models.nets.net import Net
from services.predictor.models.nets.recipes import RANKER, ScoreModel
from services.predictor.models.preparation import FeatureSelection, Preparation
from services.predictor.models.scale import Scale
from services.predictor.models.spread import Floats

Tensors = Mapping[str, Tensor]

_ARRAYS = ("known", "idf", "middle", "deviation")  # fields of Preparation


@dataclass(frozen=True)
class Calibration:
    """Out-of-fold quantiles [n, 64] of training requests, their applications and true lengths [n].

    `examples` is the number of requests before truncation to n.
    """

    spread: Floats
    applications: tuple[str, ...]
    lengths: Floats
    examples: int


def to_tensors(model: ScoreModel) -> tuple[dict[str, Tensor], str]:
    """Returns tensors and a description, the inverse of `from_tensors`."""
    preparation = model.ensemble.preparation
    arrays = {f"preparation.{name}": getattr(preparation, name) for name in _ARRAYS}
    arrays |= {"scale.knots": model.scale.knots, "scale.logs": model.scale.logs}
    tensors = {key: torch.from_numpy(np.ascontiguousarray(a)) for key, a in arrays.items()}
    for i, net in enumerate(model.ensemble.nets):
        tensors |= {f"net.{i}.{key}": t.contiguous() for key, t in net.state_dict().items()}
    described = {
        "nets": len(model.ensemble.nets),
        "view": asdict(preparation.view),
        "names": preparation.names,
    }
    return tensors, json.dumps(described)


def from_tensors(tensors: Tensors, described: str) -> ScoreModel:
    """Raises KeyError, TypeError, ValueError or RuntimeError for invalid input."""
    known = json.loads(described)
    preparation = Preparation(
        view=FeatureSelection(**known["view"]),
        names=dict(known["names"]),
        **{name: tensors[f"preparation.{name}"].numpy() for name in _ARRAYS},
    )
    nets = tuple(_net(preparation, tensors, f"net.{i}.") for i in range(known["nets"]))
    scale = Scale(tensors["scale.knots"].numpy(), tensors["scale.logs"].numpy())
    return ScoreModel(Ensemble(preparation, nets), scale)


def calibration_to_tensors(calibration: Calibration) -> tuple[dict[str, Tensor], str]:
    tensors = {
        "unseen.spread": torch.from_numpy(calibration.spread.astype(np.float32)),
        "unseen.lengths": torch.from_numpy(calibration.lengths.astype(np.float32)),
    }
    described = {"applications": calibration.applications, "examples": calibration.examples}
    return tensors, json.dumps(described)


def calibration_from_tensors(tensors: Tensors, described: str) -> Calibration:
    """Raises the same errors as `from_tensors`."""
    known = json.loads(described)
    spread = tensors["unseen.spread"].numpy().astype(float)
    lengths = tensors["unseen.lengths"].numpy().astype(float)
    applications = tuple(map(str, known["applications"]))
    if not len(spread) == len(lengths) == len(applications):
        raise ValueError("the calibration's parts differ in length")
    return Calibration(spread, applications, lengths, int(known["examples"]))


def _net(preparation: Preparation, tensors: Tensors, prefix: str) -> Net:
    net = Net(preparation, RANKER.outputs)
    net.load_state_dict(
        {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    )
    return net.eval()

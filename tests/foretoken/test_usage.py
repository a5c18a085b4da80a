"""Foreign and mistyped options are reported in one line each."""

import re

import pytest
import typer
from typer.main import get_command

from foretoken.__main__ import app
from foretoken.commands.foreign_options import FOREIGN
from foretoken.commands.usage import describe_unknown, near, repeat_options
from gateway.config import GatewayConfig
from services.batcher.config import BatcherConfig
from services.estimator.config import EstimatorConfig
from services.predictor.config import PredictorConfig
from services.runtime.config import Settings
from services.runtime.telemetry.logs import LoggingConfig
from services.runtime.telemetry.tracing import TracingConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig

SETTING = re.compile(r"--set (\w+)\.(\w+)=")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
KINDS: tuple[type[Settings], ...] = (
    BatcherConfig, EstimatorConfig, GatewayConfig, LoggingConfig, PredictorConfig, SchedulerConfig,
    TracingConfig, WorkerConfig,
)  # fmt: skip
KNOWN = {kind.section: kind.model_fields for kind in KINDS}


def options_of(command: str) -> set[str]:
    group = get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    params = group.commands[command].params
    return {name for param in params for name in (*param.opts, *param.secondary_opts)}


OURS = options_of("serve")


@pytest.mark.parametrize("theirs", FOREIGN)
def test_foreign_option_is_translated(theirs: str) -> None:
    assert theirs not in OURS, "translates an option that serve has"
    message = FOREIGN[theirs]
    assert message.startswith(
        ("--", "is not supported: ", "is not needed: ", "is not supported for ")
    )
    for section, key in SETTING.findall(message):
        assert key in KNOWN[section]
    for option in OPTION.findall(message):
        assert option in OURS
    reported = describe_unknown(
        theirs[:2] if theirs[1] != "-" else theirs, [f"{theirs}=3"], OURS, FOREIGN
    )
    assert reported.startswith((f"{theirs}: use --", f"{theirs} is not ")) and "\n" not in reported


def test_all_foreign_options_are_translated_together() -> None:
    args = ["m", "-tp", "2", "--max-num-seqs=4", "--policy", "fcfs", "--polcy"]
    assert describe_unknown("-t", args, OURS, FOREIGN) == (
        "-tp: use --tensor-parallel N; --max-num-seqs: use --set worker.max_running=VALUE"
    )


@pytest.mark.parametrize(
    ("unknown", "message"),
    [
        ("--polcy", "unknown option --polcy, did you mean --policy?"),
        ("--kv-token", "unknown option --kv-token, did you mean --kv-tokens?"),
        ("--frobnicate", "unknown option --frobnicate; --help lists all options"),
    ],
)
def test_mistyped_option_gets_a_suggestion(unknown: str, message: str) -> None:
    assert describe_unknown(unknown, [unknown, "x"], OURS, FOREIGN) == message


def test_near_is_empty_without_a_similar_word() -> None:
    assert near("zzz", ["abc"]) == "" and near("abd", ["abc"]) == ", did you mean abc?"


def test_repeated_option_values_are_expanded() -> None:
    meant = ["--compare", "A", "--compare", "B", "--rate", "3"]
    assert repeat_options(["--compare", "A", "B", "--rate", "3"]) == meant


@pytest.mark.parametrize("command", ["serve", "bench", "chat"])
def test_every_option_has_help(command: str) -> None:
    group = get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for param in group.commands[command].params:
        reported = getattr(param, "help", "")
        assert reported and reported.endswith((".", ":", "repeatable.")), param.name
        assert len(reported) < 100, param.name

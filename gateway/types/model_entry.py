"""One model of `gateway.models`: what differs between the models of a gateway. Pure."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.runtime.network.leader_channel import LeaderAddress

REQUIRED = {
    "model": "the folder or hub name with its tokenizer",
    "scheduler_address": "the address of its scheduler",
}


class ModelEntry(BaseModel):
    """A model and its scheduler. An omitted setting is that of the section."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    scheduler_address: LeaderAddress
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    generation_config: Literal["auto", "off"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        known = ", ".join(cls.model_fields)
        for key in given:
            if key not in cls.model_fields:
                raise ValueError(f"{key} is not a setting of one model; known: {known}")
        for key, meaning in REQUIRED.items():
            if not given.get(key):
                raise ValueError(f"needs {key}, {meaning}")
        return given

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that replace those of the section."""
        return self.model_dump(exclude_none=True)

    @property
    def schedulers(self) -> frozenset[str]:
        """The address of its scheduler, or those of leader and standby."""
        return frozenset(part.strip() for part in self.scheduler_address.split(","))

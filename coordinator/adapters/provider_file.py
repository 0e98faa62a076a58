"""The operator's providers file (TOML): which providers, with which key, budget and image. Unknown names are errors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal, Self

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from coordinator.adapters.providers import CALL_S, HttpSender, RemoteProvider, read_key
from coordinator.adapters.sky import SkySender
from coordinator.errors import CannotServe
from coordinator.service.renting_ports import Provider, RentingSettings
from pricing.feeds.contract import Need
from pricing.feeds.runpod import RunPod
from pricing.feeds.skypilot import SkyPilot
from pricing.feeds.start import environment
from pricing.feeds.vast import Vast
from pricing.money import usd_to_uusd
from pricing.rentals import Limits

MOST_FILE_BYTES = 1 << 20
TURN_S = 180.0
SKY_CALL_S = 120.0
ADDRESSES = {"vast": "https://console.vast.ai", "runpod": "https://api.runpod.io"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NeedSection(_Strict):
    """`[provider.NAME.need]`: what is searched for."""

    cards: tuple[str, ...] = ()
    min_vram_gb: int = Field(0, ge=0, le=1000)
    most_usd_per_hour: float = Field(2.0, gt=0, le=1000)
    min_reliability: float = Field(0.0, ge=0, le=1)
    min_down_mbps: float = Field(0.0, ge=0)
    most_usd_per_gb: float = Field(0.005, ge=0, le=10, description="of traffic, which the provider bills beside the hours")


class LimitsSection(_Strict):
    """`[provider.NAME.limits]`: patience, in seconds."""

    appear_s: float = Field(120.0, ge=10, le=3600)
    start_s: float = Field(900.0, ge=30)
    join_s: float = Field(900.0, ge=30)
    silent_s: float = Field(600.0, ge=30)
    blind_s: float = Field(600.0)
    stop_s: float = Field(1800.0, ge=60)
    margin_percent: int = Field(25, ge=0, le=1000)


class ProviderSection(_Strict):
    """`[provider.NAME]`."""

    url: str = Field(description="where rented workers find the coordinator")
    image: str = Field(min_length=1, description="a container with echo2-worker")
    budget_usd: float = Field(gt=0, description="the most that its machines may cost, over all time")
    key_file: Path | None = Field(None, description="absolute path; holds the provider's key; mode 0600")
    address: str | None = Field(None, description="of the provider's interface; unset: the public one")
    disk_gb: int = Field(40, ge=8, le=4096)
    give_up_min: float = Field(30.0, ge=1, le=1440)
    look_s: float = Field(30.0, ge=5, le=300)
    worker_options: tuple[str, ...] = ()
    need: NeedSection = NeedSection()
    limits: LimitsSection = LimitsSection()

    @field_validator("url")
    @classmethod
    def _is_a_web_address(cls, url: str) -> str:
        if not url.startswith(("https://", "http://")):
            raise ValueError("give the coordinator's address with https://")
        environment(url=url, invite="")
        return url

    @field_validator("key_file")
    @classmethod
    def _is_a_path(cls, path: Path | None) -> Path | None:
        """A key that was written here by mistake is no absolute path: it is refused before anything repeats it."""
        if path is not None and not path.expanduser().is_absolute():
            raise ValueError("give the absolute path of a file that holds the key")
        return path

    @model_validator(mode="after")
    def _turns_fit(self) -> Self:
        """The budget's promise needs turns that are no more than `blind_s` apart."""
        least = self.look_s + TURN_S + CALL_S
        if self.limits.blind_s < least:
            raise ValueError(f"limits.blind_s is {self.limits.blind_s:g}: with look_s {self.look_s:g} give at least {least:g}")
        return self


class ProvidersFile(_Strict):
    """The whole file."""

    provider: dict[Literal["vast", "runpod", "skypilot"], ProviderSection] = {}


def read_providers(path: Path) -> ProvidersFile:
    """Raises CannotServe, naming field and value."""
    try:
        content = path.read_bytes()[: MOST_FILE_BYTES + 1]
        if len(content) > MOST_FILE_BYTES:
            raise CannotServe(f"providers file {path} has more than {MOST_FILE_BYTES} bytes")
        return ProvidersFile.model_validate(tomllib.loads(content.decode("utf-8")))
    except OSError as error:
        raise CannotServe(f"providers file {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CannotServe(f"providers file {path} is not TOML: {error}") from error
    except ValidationError as error:
        raise CannotServe(f"providers file {path}: {_said(error.errors(include_url=False)[0])}") from None


def _said(error: ErrorDetails) -> str:
    """What is wrong, without the values of names that are unknown, or of whole tables: somebody may have put a key there."""
    name = ".".join(str(part) for part in error["loc"])
    is_safe = error["type"] not in ("missing", "extra_forbidden") and not name.endswith("key_file")
    value, fix = error["input"], error["msg"].removeprefix("Value error, ")
    return f"{name} is {value!r}: {fix}" if is_safe and not isinstance(value, dict) else f"{name}: {fix}"


def renting_settings(section: ProviderSection) -> RentingSettings:
    """The service's part."""
    need = section.need
    return RentingSettings(
        budget_uusd=usd_to_uusd(section.budget_usd),
        url=section.url,
        image=section.image,
        worker_options=section.worker_options,
        give_up_min=section.give_up_min,
        disk_gb=section.disk_gb,
        need=Need(
            cards=need.cards,
            min_vram_mb=need.min_vram_gb * 1000,
            most_uusd_per_hour=usd_to_uusd(need.most_usd_per_hour),
            disk_gb=section.disk_gb,
            min_reliability=need.min_reliability,
            min_down_mbps=need.min_down_mbps,
            most_uusd_per_gb=usd_to_uusd(need.most_usd_per_gb),
        ),
        limits=Limits(**section.limits.model_dump()),
        look_s=section.look_s,
        turn_s=TURN_S,
    )


def provider_of(name: str, section: ProviderSection, session: aiohttp.ClientSession) -> Provider:
    """The provider behind a section. Raises CannotServe when its key cannot be used."""
    if name == "skypilot":
        return RemoteProvider(SkyPilot(), SkySender(), call_s=SKY_CALL_S)
    if section.key_file is None:
        raise CannotServe(f"providers file: provider.{name}.key_file is missing: name the file that holds the key")
    feed = Vast() if name == "vast" else RunPod()
    return RemoteProvider(feed, HttpSender(session, section.address or ADDRESSES[name], read_key(section.key_file.expanduser())))

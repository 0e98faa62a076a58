"""The coordinator's settings: the only reader of ECHO2_* variables. Options of `echo2 serve` override them."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from coordinator.errors import CoordinatorError


class Settings(BaseSettings):
    """Everything `echo2 serve` can be told; each field is also the variable ECHO2_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="ECHO2_", extra="ignore", frozen=True)

    data_dir: Path = Field(Path("~/.local/share/echo2"), description="rows, blobs, pieces, checkpoints, keys")
    database_url: SecretStr | None = Field(None, description="postgresql://...; unset: SQLite in data_dir")
    host: str = "127.0.0.1"
    port: int = Field(7700, ge=0, le=65535, description="0 picks a free port")
    tls: Literal["off", "self-signed", "files"] = Field("off", description="off: loopback, or behind a proxy that ends TLS")
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    behind_proxy: bool = Field(False, description="allow plain HTTP on a public address because a proxy ends TLS")
    roots: tuple[Path, ...] = Field((), description="folders that names in a job may resolve into")
    heartbeat_s: float = Field(10.0, gt=0, le=300)
    restart_grace_s: float = Field(60.0, ge=0, le=3600)
    peer_networks: tuple[str, ...] = Field((), description="private networks (CIDR) that workers may dial peers in")
    public_host: str | None = Field(
        None, description="address literal under which workers reach seeder and control port; unset: host, or where they reach us"
    )
    seeder_port: int | None = Field(
        None, ge=0, le=65535, description="where weights are served to workers; unset: port + 1; 0: a free one"
    )
    seeder_up_mbit: float = Field(
        0.0, ge=0, description="most that the seeder takes of the uplink, beside what workers ask over HTTPS; 0: no limit"
    )
    control_port: int | None = Field(
        None, ge=0, le=65535, description="where libp2p takes control messages; unset: port + 2; 0: a free one"
    )
    libp2p: bool = Field(True, description="false: control messages go over HTTPS only")
    grader_processes: int = Field(2, ge=1, le=64)
    max_running_jobs: int = Field(1, ge=1, le=64)
    minimum_free_bytes: int = Field(256 << 20, ge=0, description="below it jobs pause before anything can be lost")
    allow_scripted: bool = Field(False, description="accept scripted engines (tests and load runs)")
    learner_least_step_s: float = Field(
        0.0, ge=0, le=3600, description="rehearsals: a training step takes at least so long, as it would with a larger model"
    )
    providers: Path | None = Field(
        None, description="TOML file of providers to rent machines from (docs/providers.md); unset: none"
    )
    crash_at: str | None = Field(None, description="crash tests: kill this process at commit point NAME:COUNT")
    learner_crash_at: str | None = Field(None, description="crash tests: kill the learner at commit point NAME:COUNT")

    @field_validator("peer_networks")
    @classmethod
    def _networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)
        return networks

    @field_validator("public_host")
    @classmethod
    def _literal(cls, host: str | None) -> str | None:
        if host is not None:
            ipaddress.ip_address(host)
        return host

    @property
    def told_host(self) -> str | None:
        """Where workers are told to find seeder and control port; None: nowhere, since behind a proxy nobody reaches a loopback."""
        is_loopback = self.host in ("127.0.0.1", "::1", "localhost")
        if self.public_host is None and self.behind_proxy and is_loopback:
            return None
        return self.public_host or self.host

    @property
    def home(self) -> Path:
        """The data directory, absolute."""
        return self.data_dir.expanduser().resolve()

    @property
    def store_url(self) -> str:
        """Where rows live."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.home / 'echo2.sqlite3'}"


def read_settings(**given: Any) -> Settings:
    """The settings from the environment, with those given on top. Raises CoordinatorError, naming option and variable."""
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        variable = f"ECHO2_{str(first['loc'][0]).upper()}"
        raise CoordinatorError(f"setting {name} ({variable}) is {first['input']!r}: {first['msg']}") from error
    except SettingsError as error:
        raise CoordinatorError(f'{error}: lists are JSON, for example ECHO2_ROOTS=\'["/models", "/datasets"]\'') from error

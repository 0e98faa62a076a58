"""Builds a job's data plane: resolves the names in its job file and hands them to jailed processes."""

from __future__ import annotations

from pathlib import Path

from coordinator.domain.model import Job
from coordinator.environments.plane import DataPlaneSpec, JailedDataPlane
from coordinator.service.deps import ServiceSettings
from coordinator.service.files import resolve_name, uploads_dir
from coordinator.service.operator_errors import RequestRefused
from coordinator.service.ports import DataPlane, EnvironmentBroken
from coordinator.wire.environment import code_of


class JailedPlanes:
    """Implements `service.job_ports.PlaneStarter`."""

    def __init__(self, settings: ServiceSettings, *, processes: int) -> None:
        self._settings = settings
        self._processes = processes

    def plane(self, job: Job) -> DataPlane:
        """A plane for the job's environment; names are resolved anew, since an operator may have narrowed the roots."""
        environment = job.config.environment
        files = {named.name: self._file(named.name, named.field) for named in environment.files()}
        code = code_of(environment.type)
        spec = DataPlaneSpec(
            environment=environment,
            seed=job.config.seed,
            tokenizer_dir=Path(job.model_dir),
            train=None if environment.train is None else files[environment.train],
            eval=None if environment.eval is None else files[environment.eval],
            code=None if code is None else files[code],
            files=files,
            new_tokens=job.config.sampling.max_new_tokens,
            dated=job.created_at,
        )
        return JailedDataPlane(spec, processes=self._processes)

    def _file(self, name: str, field: str) -> Path:
        try:
            return resolve_name(
                name, field=field, roots=self._settings.roots, uploads=uploads_dir(self._settings.data_dir), directory=False
            )
        except RequestRefused as refused:
            raise EnvironmentBroken(refused.detail) from refused

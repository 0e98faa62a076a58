"""Builds a job's data plane: resolves the names in its job file and hands them to jailed processes."""

from __future__ import annotations

from pathlib import Path

from coordinator.domain.model import Job
from coordinator.environments.plane import DataPlaneSpec, JailedDataPlane
from coordinator.service.deps import ServiceSettings
from coordinator.service.files import resolve_name, uploads_dir
from coordinator.service.operator_errors import RequestRefused
from coordinator.service.ports import DataPlane, EnvironmentBroken


class JailedPlanes:
    """Implements `service.job_ports.PlaneStarter`."""

    def __init__(self, settings: ServiceSettings, *, processes: int) -> None:
        self._settings = settings
        self._processes = processes

    def plane(self, job: Job) -> DataPlane:
        """A plane for the job's environment; names are resolved anew, since an operator may have narrowed the roots."""
        environment = job.config.environment
        kind, _, rest = environment.type.partition(":")
        code = self._file(rest.rpartition(":")[0], "environment.type") if kind == "python" else None
        spec = DataPlaneSpec(
            environment=environment,
            seed=job.config.seed,
            tokenizer_dir=Path(job.model_dir),
            train=self._file(environment.train, "environment.train"),
            eval=self._file(environment.eval, "environment.eval"),
            code=code,
        )
        return JailedDataPlane(spec, processes=self._processes)

    def _file(self, name: str | None, field: str) -> Path | None:
        if name is None:
            return None
        try:
            return resolve_name(
                name, field=field, roots=self._settings.roots, uploads=uploads_dir(self._settings.data_dir), directory=False
            )
        except RequestRefused as refused:
            raise EnvironmentBroken(refused.detail) from refused

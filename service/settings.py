"""What an operator may set, each with the reason for its default. The only module that reads the environment.

Every setting is ``CLOZE_<NAME>`` in the environment and ``--<name>`` on ``cloze serve``; the flag wins.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model_store.locations import DEFAULT_ROOT
from service.core import Device, RequestedPrecision, StartupError

ENV_PREFIX = "CLOZE_"

CPU_BATCH_TOKENS = 512

_GPU_WORKERS = 2


_CGROUP = Path("/sys/fs/cgroup")


def available_cpus(control_group: Path = _CGROUP, cores: int | None = None) -> int:
    """Cores this process may use: its affinity, and the quota of its control group (v2 or v1), rounded up.

    Args:
        control_group: where Linux shows it.
        cores: of the affinity; asked of the system if not given.
    """
    cores = cores or len(os.sched_getaffinity(0))
    for read_quota in (_quota_v2, _quota_v1):
        if (quota := read_quota(control_group)) is not None:
            return max(1, min(cores, math.ceil(quota)))
    return cores


def _quota_v2(control_group: Path) -> float | None:
    try:
        quota, period = (control_group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(control_group: Path) -> float | None:
    try:
        quota = int((control_group / "cpu/cpu.cfs_quota_us").read_text())
        return (
            quota / int((control_group / "cpu/cpu.cfs_period_us").read_text())
            if quota > 0
            else None
        )
    except (OSError, ValueError):
        return None


class Settings(BaseSettings):
    """The service's settings. Names carry their units."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    host: str = Field(
        "127.0.0.1", min_length=1, description="address to listen on; a container wants 0.0.0.0"
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    model_store: Path = Field(DEFAULT_ROOT, description="folder of the bundles")
    model: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="bundles to serve, NAME or NAME@VERSION, comma-separated in the environment; none: the newest of each name",
    )
    device: Device = Field(
        Device.AUTO, description="auto, cpu or cuda; cuda that does not come up stops the start"
    )
    precision: RequestedPrecision = Field(
        "auto",
        description="arithmetic: fp32, int8 (on a CPU), fp16 (on CUDA); auto: fp16 on CUDA, int8 where the processor has "
        "instructions for it, each if the bundle has it, else fp32",
    )
    frontends: int = Field(
        0,
        ge=0,
        le=256,
        description="processes that speak HTTP and tokenize, before one engine process a device; 0: one process does it all",
    )
    gpus: int = Field(
        1,
        ge=1,
        le=64,
        description="devices, each with an engine process of its own; more than 1 needs frontends",
    )
    workers: int = Field(
        0,
        ge=0,
        le=1024,
        description="batches of a model that run at once; 0: as many as this process may use cores for, on a GPU two",
    )
    intra_op_threads: int = Field(
        1,
        ge=1,
        le=1024,
        description="threads of a run on a CPU; 2 answer a lone request sooner, fp32 nearly twice, but 15 to 20 % fewer texts",
    )
    max_batch_tokens: int = Field(
        0,
        ge=0,
        description="most tokens in a batch; 0: 512 on a CPU, where more is slower and delays others, on a GPU fitted at start",
    )
    batch_latency_ms: int = Field(
        20, ge=1, le=60_000, description="longest run of a batch whose size is fitted at the start"
    )
    gpu_memory_limit_mb: int = Field(
        0, ge=0, description="memory of the GPU that a model may take; 0: all there is"
    )
    max_queue_tokens: int = Field(
        262_144,
        ge=1,
        description="most tokens that may wait for a model; beyond it requests get 429. Half a minute of MiniLM on 2 cores",
    )
    max_request_bytes: int = Field(
        8_388_608,
        ge=1024,
        description="largest request body; 2,048 texts of 512 tokens are about 5 MB",
    )
    max_request_texts: int = Field(
        2048, ge=1, description="most texts in one request; what OpenAI's API allows"
    )
    max_request_tokens: int = Field(
        1_048_576,
        ge=1,
        description="most tokens run for one request, windows of long contexts counted; 2,048 sequences of 512",
    )
    max_request_results: int = Field(
        32_768,
        ge=1,
        description="most predictions or answers in one request: masks or questions, times top_k",
    )
    max_text_characters: int = Field(
        1_000_000,
        ge=1,
        description="longest single text; its tokens take 250 times its size in memory while they are cut",
    )
    max_masks: int = Field(64, ge=1, description="most mask tokens in one text")
    max_top_k: int = Field(1000, ge=1, description="most predictions a mask, or answers a question")
    request_timeout_ms: int = Field(
        30_000, ge=1, le=86_400_000, description="a request without an answer by then gets 504"
    )
    stall_timeout_ms: int = Field(
        60_000,
        ge=1,
        le=86_400_000,
        description="a run of the engine that takes longer hangs: the process ends with an error",
    )
    shutdown_grace_ms: int = Field(
        20_000,
        ge=0,
        le=86_400_000,
        description="after SIGTERM, time for accepted requests to finish; less than Kubernetes' 30 s",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log line to write"
    )

    @field_validator("model", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return (
            tuple(name.strip() for name in value.split(",") if name.strip())
            if isinstance(value, str)
            else value
        )

    def worker_count(self, device: Device) -> int:
        """Worker threads a model; of a GPU's two, one packs a batch while the other's runs."""
        return self.workers or (
            _GPU_WORKERS
            if device is Device.CUDA
            else max(1, available_cpus() // self.intra_op_threads)
        )


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Settings from flags, then the environment, then the defaults.

    Raises:
        StartupError: a value is malformed or out of its limits; names the variable or flag, the value, and the limit.
    """
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        return Settings(**flags)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        shown = f"--{name.replace('_', '-')}" if name in flags else f"{ENV_PREFIX}{name.upper()}"
        raise StartupError(f"{shown}: {first['msg'].lower()}, got {first['input']!r}") from None


def unknown_variables() -> list[str]:
    """Variables that begin like ours but are no setting: most likely misspelt."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)

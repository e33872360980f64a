"""The settings of the service. The only module that reads the environment.

Every setting is the variable ``CLOZE_<NAME>`` in the environment and the option ``--<name>`` of
``cloze serve``. The option takes precedence.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from cloze.model_store.docstrings import field_docstrings
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.core import Device, LogFormat, RequestedPrecision
from cloze.service.errors import StartupError
from cloze.service.machine import available_cpus

ENV_PREFIX = "CLOZE_"

_DEFAULT = f"{ENV_PREFIX}DEFAULT"
_DEFAULT_OF_A_TASK = f"{_DEFAULT}_"

_ALIAS = re.compile(r"[!-+\--<>-~]{1,200}")
"""Printable ASCII without spaces, commas and equals signs."""

CPU_BATCH_TOKENS = 512
"""Default batch size limit on a CPU, in tokens."""


def _split(names: object) -> object:
    """Return the names in a list that is separated by commas; anything else as it is."""
    if not isinstance(names, str):
        return names
    return tuple(name.strip() for name in names.split(",") if name.strip())


_Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
_Natural = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]
_MillisecondsOrZero = Annotated[int, Field(ge=0, le=86_400_000)]
_TimeoutMilliseconds = Annotated[int, Field(ge=100, le=86_400_000)]
_Bytes = Annotated[int, Field(ge=1024)]

PATH = r"^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*$"
"""Paths below which a proxy may have a server: no part is empty or begins with a dot."""

_RootPath = Annotated[
    str,
    BeforeValidator(lambda path: path.rstrip("/") if isinstance(path, str) else path),
    Field(max_length=200, pattern=PATH),
]
_Route = Annotated[str, Field(max_length=500, pattern=r"^(/[A-Za-z0-9._~:@-]+)*$")]


class Settings(BaseModel):
    """The settings of the service; names of quantities end with a unit.

    The docstring of a setting is its description on the command line and in `docs/settings.md`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """address to listen on; use 0.0.0.0 in a container"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """port to listen on; 0: any free port"""
    model_store: Path = DEFAULT_ROOT
    """folder that contains the bundles"""
    model: _Names = ()
    """models to serve: bundles, as NAME or NAME@VERSION; directories, as ./path; repositories, as
    hub:org/name@revision; or addresses, as s3://bucket/path or https://host/name.tar.gz; repeat the
    option, or separate names by commas in the environment; default: the newest version of each
    bundle"""
    default: _Names = ()
    """the model that answers a task's requests which name none, as TASK=NAME; repeat the option, or
    set one variable per task, for example CLOZE_DEFAULT_FILL_MASK; default: the first that serves
    the task, in the order of `model`, or else the bundled ones and then the oldest name"""
    alias: _Names = ()
    """other names of served models, as ALIAS=NAME, for clients whose model names are fixed, for
    example text-embedding-3-small=my-model; repeat the option, or separate them by commas in the
    environment; default: none"""
    adapter: _Names = ()
    """adapters to serve, as PEFT writes them: a folder with adapter_config.json, or a folder of
    such folders; each is a model with the name of its folder, on the first bundle that takes it
    (`cloze export --adapters`); repeat the option, or separate folders by commas in the
    environment; default: none"""
    adapter_memory_mb: _Positive = 1024
    """most memory of the adapters of a model, in MiB; an adapter is read when it is first asked
    for, and the one that was not used for longest makes room"""
    device: Device = Device.AUTO
    """device to run on: auto, cpu or cuda; with cuda, the server does not start without a working
    GPU"""
    precision: RequestedPrecision = "auto"
    """precision of the arithmetic: auto, fp32, int8 (CPU only) or fp16 (CUDA only); auto: fp16 on
    CUDA, int8 on a processor with VNNI or similar instructions or with AVX2 but not AVX-512, and
    fp32 otherwise or if the bundle has no graph of that precision"""
    frontends: Annotated[int, Field(ge=0, le=256)] = 0
    """number of processes that handle HTTP and tokenize, with one engine process per device; 0: one
    process handles everything"""
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    """number of devices, with one engine process per device; more than 1 requires frontends of at
    least 1"""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """worker threads per model, which run batches in parallel; 0: available cores divided by
    intra_op_threads on a CPU, 2 on a GPU"""
    intra_op_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """threads per batch on a CPU while several batches run; a batch that runs alone uses all cores,
    up to 8; more than 1 lowers the throughput"""
    max_batch_tokens: _Natural = 0
    """batch size limit in tokens; 0: on a CPU what runs within batch_latency_ms at the measured
    rate, from 128 to 512; on a GPU a value measured at start-up"""
    batch_latency_ms: Annotated[int, Field(ge=1, le=60_000)] = 20
    """longest duration of a batch of several texts if max_batch_tokens is 0"""
    cache_mb: _Natural = 0
    """most memory of results that are kept for equal texts of one API key or address, in MiB, per
    process that handles HTTP; a reload drops them; 0: none"""
    gpu_memory_limit_mb: _Natural = 0
    """most GPU memory per model, in MiB; 0: no limit"""
    max_queue_tokens: _Positive = 524_288
    """most queued tokens per model, which bounds the memory of the queue; further requests get
    status 429; one line of a client holds half of them at most"""
    max_queue_wait_ms: _MillisecondsOrZero | None = None
    """longest expected wait for the first batch of a request that states no time limit; a request
    that would wait longer gets status 429 at once; 0: no limit; not set: 2500, and a client may
    have 64 requests waiting for longer, if they end within its share of half the request timeout"""
    max_request_bytes: _Bytes = 8_388_608
    """largest request body in bytes; 2,048 texts of 512 tokens have about 5 MB"""
    max_bodies_bytes: _Bytes = 33_554_432
    """most bytes of all request bodies above 64 KiB that a process holds at once; one client holds
    half of them at most; further ones wait, and get status 429 after max_queue_wait_ms, or 2.5 s"""
    max_answers_bytes: _Bytes = 67_108_864
    """most bytes of all answers above 64 KiB that clients of a process have not read; one client
    holds half of them at most; further large ones wait, and connections that read nothing within
    the request timeout are closed"""
    max_request_texts: _Positive = 2048
    """most texts per request; the default is the limit of OpenAI's API"""
    max_request_tokens: _Positive = 1_048_576
    """most tokens per request, including all windows of long texts; the default is 2,048 sequences
    of 512 tokens"""
    max_request_results: _Positive = 32_768
    """most predictions or answers per request: the number of masks or questions times top_k, or of
    texts times candidate_labels; also the most tokens that /tokenize returns and /decode reads"""
    max_text_characters: _Positive = 1_000_000
    """longest text in characters; longer texts than 16,384 are tokenized in pieces"""
    max_masks: _Positive = 64
    """most mask tokens per text"""
    max_top_k: _Positive = 1000
    """most predictions per mask, or answers per question"""
    request_timeout_ms: _Milliseconds = 30_000
    """time limit of a request without X-Request-Timeout-Ms; a request without a result by then gets
    status 504"""
    max_request_timeout_ms: _Milliseconds = 300_000
    """longest time limit that a request may state by X-Request-Timeout-Ms"""
    header_timeout_ms: _TimeoutMilliseconds = 10_000
    """longest time in which the headers of a request arrive"""
    idle_timeout_ms: _TimeoutMilliseconds = 75_000
    """longest time that a connection stays open without a request; load balancers usually close
    theirs after 60 s, and must do so first"""
    max_connections: _Natural = 0
    """most open connections per process that handles HTTP; the one that is idle for longest makes
    room for a new one; 0: what the limit of open files allows"""
    max_connections_per_address: _Natural = 0
    """most open connections per address; 0: no limit, as behind a proxy"""
    traces_endpoint: str = ""
    """base address of an OpenTelemetry collector, such as http://localhost:4318, which receives
    spans by OTLP over HTTP; default: no traces"""
    traces_share: _Share = 1.0
    """share of requests to trace that bring no trace of their own"""
    keys_file: Path | None = None
    """TOML file of API keys, made by `cloze keys add`; default: no key is needed"""
    allow_anonymous: bool = False
    """do not warn of an address that others reach, without keys"""
    tls_certificate: Path | None = None
    """PEM file of the server's certificate chain; default: no TLS"""
    tls_key: Path | None = None
    """PEM file of the certificate's private key"""
    cors_origins: _Names = ()
    """origins whose pages may send requests, for example https://app.example; repeat the option, or
    separate them by commas in the environment; default: none"""
    allowed_hosts: _Names = ()
    """names that the Host header of a request may have; repeat the option, or separate them by
    commas in the environment; default: any, but on a loopback address only its own names"""
    root_path: _RootPath = ""
    """path below which clients reach the server, such as /nlp; paths are answered with it, and
    without it, as a proxy that removes it asks for them; default: none"""
    predict_route: _Route = ""
    """another path of POST /vertex, such as /predict; the images take that of AIP_PREDICT_ROUTE;
    default: none"""
    health_route: _Route = ""
    """another path of GET /health; the images take that of AIP_HEALTH_ROUTE; default: none"""
    trusted_proxies: _Names = ()
    """addresses and networks of proxies whose X-Forwarded-For names the client; repeat the option,
    or separate them by commas in the environment"""
    stall_timeout_ms: _Milliseconds = 2_000
    """time that a batch may take beyond ten times its predicted time, or beyond 60 s before any
    batch was measured; then the engine hangs, and the process exits with an error"""
    canary_interval_ms: _MillisecondsOrZero = 5_000
    """time without a batch after which each model runs a golden batch, so that readiness fails when
    the device is lost although nobody asks; 0: never"""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 0
    """seconds after SIGTERM in which readiness fails but requests are still served, each answer
    closing its connection, so that a balancer has the time to notice"""
    shutdown_grace_ms: _MillisecondsOrZero = 20_000
    """time for accepted requests to finish after SIGTERM and drain_s; the default is below the 30 s
    of Kubernetes"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level of log lines: debug, info, warning or error"""
    log_format: LogFormat = "text"
    """format of log lines: text, or json with one object per line"""
    access_log_share: _Share = 1.0
    """share of the answered requests that get a log line at level info; errors always get one,
    probes and scrapes only at level debug"""

    @field_validator("default")
    @classmethod
    def _one_default_per_task(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        tasks = [pair.partition("=")[0] for pair in value]
        for pair, task in zip(value, tasks, strict=True):
            if not all(pair.partition("=")):
                raise ValueError(f"{pair!r} is not TASK=NAME")
            if tasks.count(task) > 1:
                raise ValueError(f"the task {task!r} has two defaults")
        return value

    @field_validator("alias")
    @classmethod
    def _one_model_per_alias(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [pair.partition("=")[0] for pair in value]
        for pair, alias in zip(value, names, strict=True):
            if not (_ALIAS.fullmatch(alias) and pair[len(alias) + 1 :]):
                raise ValueError(
                    f"{pair[:80]!a} is not ALIAS=NAME; an alias has 1 to 200 printable ASCII "
                    "characters, without spaces, commas and ="
                )
            if names.count(alias) > 1:
                raise ValueError(f"the alias {alias!r} has two models")
        return value

    @model_validator(mode="after")
    def _fit_each_other(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")
        if self.adapter and (self.frontends or self.gpus > 1):
            raise ValueError("adapters are served by one process: leave out frontends and gpus")
        return self

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ipaddress.ip_network(proxy, strict=False)) for proxy in value)

    @property
    def max_timeout_s(self) -> float:
        """The longest time limit that a request may state, in seconds."""
        return max(self.max_request_timeout_ms, self.request_timeout_ms) / 1000

    def default_models(self) -> dict[str, str]:
        """Return the models that `default` names, by task."""
        return {task: name for task, _, name in (pair.partition("=") for pair in self.default)}

    def models_of_aliases(self) -> dict[str, str]:
        """Return the models that `alias` names, by alias."""
        return {alias: name for alias, _, name in (pair.partition("=") for pair in self.alias)}

    def worker_count(self, device: Device) -> int:
        """Return the number of worker threads per model on a device."""
        if self.workers:
            return self.workers
        if device is Device.CUDA:
            return 2  # one packs a batch while the batch of the other one runs
        return max(1, available_cpus() // self.intra_op_threads)


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings: from flags, else from the environment, else the defaults.

    Args:
        flags: values by setting name, from the command line; None stands for an absent flag.

    Raises:
        StartupError: a value is malformed or out of its limits; the error names the variable or
            flag, the value and the limit.
    """
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    if "default" not in flags and (per_task := _defaults_per_task()):
        flags["default"] = ",".join([os.environ.get(_DEFAULT, ""), *per_task])
    values = {name: os.environ.get(f"{ENV_PREFIX}{name.upper()}") for name in Settings.model_fields}
    stated = {name: value for name, value in values.items() if value is not None}
    try:
        return Settings(**stated | flags)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of several settings together
            raise StartupError(str(first["ctx"]["error"])) from None
        name = str(first["loc"][0])
        shown = f"--{name.replace('_', '-')}" if name in flags else f"{ENV_PREFIX}{name.upper()}"
        if first["type"] == "value_error":
            shown = _DEFAULT if name == "default" else shown
            raise StartupError(f"{shown}: {first['ctx']['error']}") from None
        raise StartupError(f"{shown}: {first['msg'].lower()}, got {first['input']!r:.80}") from None


def description(setting: str) -> str:
    """Return the description of a setting, in one line."""
    return " ".join(field_docstrings(Settings)[setting].split())


def unknown_variables() -> list[str]:
    """Return the ``CLOZE_`` environment variables that are not settings, most likely misspelt."""
    of_clients = ("key", "url")  # the variables of `cloze ask`
    known = {f"{ENV_PREFIX}{name.upper()}" for name in (*Settings.model_fields, *of_clients)}
    return sorted(
        name
        for name in os.environ
        if name.startswith(ENV_PREFIX)
        and name not in known
        and not name.startswith(_DEFAULT_OF_A_TASK)
    )


def _defaults_per_task() -> list[str]:
    """Return the pairs TASK=NAME of the variables ``CLOZE_DEFAULT_<TASK>``."""
    return [
        f"{name.removeprefix(_DEFAULT_OF_A_TASK).lower().replace('_', '-')}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_DEFAULT_OF_A_TASK)
    ]


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine only."""
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of a text; None if it has none."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None

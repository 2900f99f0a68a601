"""A process that holds the model on its devices: loading, compilation, memory.

JAX is imported in `prepare` and later, so that the driver can import these classes without JAX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeVar

from actors.placement import alive_nodes
from configs.schema import Config
from pipeline.clock import Heartbeat, PhaseClock
from pipeline.compute.builds import Building, BuildLog, Ready
from pipeline.compute.device_memory import catch_out_of_memory, check_fits, memory_use
from pipeline.compute.opening import OpenedModel, open_model
from pipeline.compute.program_cache import share_programs
from pipeline.data.models.fingerprint import weights_fingerprint
from pipeline.data.models.hf_folder import check_folder
from pipeline.data.models.model_source import find_model, find_tokenizer
from pipeline.data.text.tokenizer_files import open_tokenizer
from pipeline.evaluate.recorded import evaluations
from pipeline.plan.sizes import Sizes, WorkerPhase, sized
from pipeline.protocols import ProcessUse
from pipeline.run.run_folder import RunFolder
from rewards.processes.parent import end_with_parent

if TYPE_CHECKING:
    from pipeline.compute.learner.export import Exporter, Score

Role = Literal["learner", "sampler"]

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", bound="ModelActor")
Method = Callable[Concatenate[A, P], T]

_NAMES: dict[WorkerPhase, str] = {"generate": "decode", "publish": "sync"}
"""Names of phases of the clock, where they differ."""


def during(phase: WorkerPhase) -> Callable[[Method[A, P, T]], Method[A, P, T]]:
    """Makes a method a phase of its process; out of memory, it raises `OutOfMemory`."""

    def decorate(method: Method[A, P, T]) -> Method[A, P, T]:
        @wraps(method)
        def run(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with self.phases.during(_NAMES.get(phase, phase)):
                return catch_out_of_memory(phase, lambda: method(self, *args, **kwargs))

        return run

    return decorate


class ModelActor(ABC):
    """Base of the classes that `actors.groups` runs as Ray actors of a run.

    `requested` is the configuration of the run, `config` the same with the chosen sizes.
    """

    role: Role

    def __init__(self, config: Config) -> None:
        end_with_parent()
        self.requested = self.config = config
        self.log = BuildLog()
        self.opening: OpenedModel | None = None
        self.phases = PhaseClock()
        self._needs: Mapping[str, int] | None = None

    def prepare(self, sizes: Sizes) -> Ready:
        """Opens devices and model and compiles; a later call compiles for other sizes.

        Can be called again after an error.

        Raises:
            ValueError: if devices, weights or tokenizer do not match the configuration.
            FileNotFoundError: if weights or tokenizer are missing.
            OutOfMemory: if these sizes need too much memory.
        """
        self.config, known = sized(self.requested, sizes), len(self.log.read().done)
        waited_s = self.log.waited_s
        self._needs = None
        with self.phases.during("loading"):
            if self.opening is None:
                self.opening = open_model(self.config, role=self.role)
            self.log.begin(len(self.programs(self.opening)))
            self.open(self.opening)
            needs = self.needs()
            for phase, programs in needs.items():
                catch_out_of_memory(phase, partial(check_fits, programs, self.config))
            self._needs = {name: size for one in needs.values() for name, size in one.items()}
            share_programs()
            _, load_s = self.opening.loading.result()
            built = self.log.read().done[known:]
            return Ready(load_s, built, self.log.waited_s - waited_s)

    def find_model(self) -> str:
        """Finds model, tokenizer and `lora.start` on this node; does not start JAX.

        A model of a hub is downloaded, if necessary. Returns the fingerprint of the weights.

        Raises:
            FileNotFoundError: if they are missing, and cannot be downloaded.
            ValueError: if they cannot be used, or not be downloaded without a login.
        """
        model, start = self.requested.model, self.requested.lora.start
        if start is not None and not Path(start).is_dir():
            raise FileNotFoundError(f"lora.start: no folder {start}")
        if model.tokenizer is not None:
            find_tokenizer(model.tokenizer)
        folder = find_model(model)
        check_folder(folder)
        return weights_fingerprint(folder)

    def node(self) -> str:
        """The node of this process, in words."""
        return str(alive_nodes()[0])

    def building(self) -> Building:
        """Returns the progress of compilation; can be called while `prepare` runs."""
        return self.log.read()

    def use(self) -> ProcessUse:
        """Returns what the process does with its time and memory; can be called at any time."""
        memory = None if self._needs is None else memory_use(self._needs)
        return ProcessUse(self.phases.take(), memory)

    def heartbeat(self) -> Heartbeat:
        """Returns what the process does now; can be called at any time."""
        return self.phases.heartbeat()

    def start_trace(self, folder: str) -> None:
        """Begins a JAX profiler trace."""
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python functions would be most of the file
        jax.profiler.start_trace(folder, profiler_options=options)

    def stop_trace(self) -> None:
        """Ends the trace and writes it."""
        import jax

        jax.profiler.stop_trace()

    def compile(self, phase: WorkerPhase, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which compiles the programs of a phase.

        Raises:
            OutOfMemory: of that phase, if the compiler or the programs run out of memory.
        """
        with self.phases.during("compile"):
            return catch_out_of_memory(phase, work)

    @abstractmethod
    def programs(self, model: OpenedModel) -> list[str]:
        """Names of the programs that `open` will compile."""

    @abstractmethod
    def open(self, model: OpenedModel) -> None:
        """Compiles for the configured sizes while the base is loaded; waits for the base.

        Raises:
            OutOfMemory: if the configured sizes need too much memory.
        """

    @abstractmethod
    def needs(self) -> dict[WorkerPhase, dict[str, int]]:
        """Returns the bytes per device of each program besides the live arrays, by phase."""


def make_exporter(
    opened: OpenedModel,
    config: Config,
    *,
    score: Score | None = None,
    described: Config | None = None,
) -> Exporter:
    """Returns the exporter of a model; the arguments are those of the class."""
    from pipeline.compute.learner.export import Exporter

    described, tokenizer = described or config, open_tokenizer(config.model)
    return Exporter(
        opened.policy,
        opened.base,
        config,
        opened.vocabulary,
        like=find_model(config.model),
        tokenizer=tokenizer.path,
        reader=tokenizer,
        evaluations=lambda: evaluations(
            RunFolder.of(described).entries(), uses_rewards=described.uses_rewards
        ),
        score=score,
        described=described,
    )

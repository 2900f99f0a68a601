"""Building blocks of every configuration table: the base class, field types, paths.

Relative paths become absolute when a configuration is read: paths of what a run reads, in a file,
relative to the file's folder; all others relative to the current folder. A submitted job runs in a
temporary folder, where $GEMMA_GRPO_HOME names the folder that it was submitted from; without it,
as by `ray job submit`, `run.dir` is relative to the user's home.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from configs.toml_text import PASSWORD

HOME_VARIABLE = "GEMMA_GRPO_HOME"
"""Environment variable of the base folder of relative paths."""
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable of the processes of a Ray job, set by Ray."""
HUB_PREFIXES = ("hf://", "kaggle://")
"""Prefixes of model paths on a hub."""
DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Endings of local data files, in any case; other paths of data are datasets on the hub."""
REWARD_FILE = ".py"
"""Ending of files with reward functions; other functions are in installed modules."""
InputKind = Literal["folder", "data", "model", "function"]
"""What a path names: a folder; a data file or a dataset on the hub; a model's folder or file, or a
model on a hub; a function in a file or in a module."""

# One slash matches too: a mistyped URL looks like this, a file system path hardly does.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@\S+)?")
# No more digits than a date can hold.
_DURATION = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,7})h)?(?:(\d{1,9})m)?(?:(\d{1,10})s)?", re.ASCII)
_DURATION_UNITS_S = (86_400, 3_600, 60, 1)

OnResume = Literal["alters", "free", "hardware", "accepted", "rewards"]
ALTERS: JsonDict = {"on_resume": "alters"}
FREE: JsonDict = {"on_resume": "free"}
HARDWARE: JsonDict = {"on_resume": "hardware"}
ACCEPTED: JsonDict = {"on_resume": "accepted"}
REWARDS: JsonDict = {"on_resume": "rewards"}
"""`json_schema_extra` of settings, or of all those of a table: whether a resume may change them.

Free ones set when and how the run ends, what is recorded, how fast rewards are computed, which
alarms are raised, what checks allow, the price and limits of memory. Hardware: devices, and how
work is divided among and on them; they change the order of sums, and with it the last bits of
results. Accepted ones need `--accept KEY`, those of rewards `--accept rewards`. All others, without
an attribute or with `ALTERS`, alter what is sampled, trained or measured.
"""

NO_PROGRAM: JsonDict = {"program": "none"}
OF_SAMPLER: JsonDict = {"program": "sampler"}
OF_LEARNER: JsonDict = {"program": "learner"}
"""`json_schema_extra` of settings that no compiled program depends on, or only by its name and
devices; or only those of samplers, or of the learner. Programs depend on all others in [plan],
[rollout] and [learner]."""

Problem = tuple[str, str]
"""A dotted key relative to the checked table ("" is the table itself), and the problem."""


class MissingSetting(AttributeError):  # noqa: N818  # raised where a mistake is known already
    """A check reads a setting that has a mistake, and so has no value."""


class Table(BaseModel):
    """A TOML table: immutable, strictly typed, unknown keys refused.

    Pydantic validates each setting by itself; `configs.load` then asks `conflicts`. A setting with
    a mistake has no value: reading it raises `MissingSetting`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Refuses to read a setting that has no value."""
            if name in type(self).model_fields:
                raise MissingSetting(name)
            return super().__getattr__(name)

    def conflicts(self) -> Iterator[Problem]:
        """Yields a problem for each setting that does not suit the others of the table."""
        yield from ()

    def changed(self, *keys: str) -> list[str]:
        """Those of the keys whose values are not the defaults."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].get_default()]

    def unused(self, *keys: str, why: str, table: str = "") -> Iterator[Problem]:
        """Yields a problem for each of the keys that is set.

        `why` begins with a preposition; `table` is this table's key in a check between tables.
        """
        for key in self.changed(*keys):
            yield f"{table}.{key}" if table else key, f"has no effect {why}; remove it"


FreeTable = dict[str, Any]
"""A table whose keys and values are those of a user's function."""

# Descriptions of the patterns in words; `configs.settings` reads them.
_SLUG = "of letters, digits, '.', '_' and '-' that begins with a letter or digit"
_FUNCTION = "of the form file.py:function or module:function"

Slug = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", json_schema_extra={"words": _SLUG})
]
Text = Annotated[str, Field(min_length=1)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
PositiveInts = Annotated[tuple[Annotated[int, Field(ge=1, strict=True)], ...], Field(strict=False)]


def is_data_file(path: str) -> bool:
    """Whether a path of data names a local file, which may be compressed with gzip."""
    return path.lower().removesuffix(".gz").endswith(DATA_FILES)


def scheme_problem(path: str, handles: tuple[str, ...] = ()) -> str | None:
    """Describes what is wrong with a path that is a URL without one of these prefixes, if so."""
    scheme = _SCHEME.match(path)
    if scheme is None or path.startswith(handles):
        return None
    hubs = f", {' and '.join(handles)}" if handles else ""
    return (
        f"{scheme.group()} is not supported; supported are file system paths{hubs}; mount or "
        "download data that is stored elsewhere"
    )


def regex_problem(pattern: str) -> str | None:
    """Describes why a pattern is no regular expression; None if it is one."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is not a regular expression: {error}"
    return None


def checked(problem: Callable[[str], str | None]) -> AfterValidator:
    """A pydantic validator of a single setting, which has no `problem`."""

    def check(value: str) -> str:
        what = problem(value)
        if what is not None:
            raise ValueError(what)
        return value

    return AfterValidator(check)


def home() -> Path:
    """The current folder of the user: $GEMMA_GRPO_HOME, else that of this process."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.cwd()).absolute()


def output_home() -> Path:
    """As `home`; in a job that `ray job submit` started the user's home.

    The folder of such a job is a copy, which Ray deletes with the cluster.
    """
    is_job = _RAY_JOB in os.environ and not os.environ.get(HOME_VARIABLE)
    return Path.home() if is_job else home()


def absolute_path(path: str, base: Path) -> str:
    """An absolute path; `~` is the user's home, and relative paths are relative to `base`.

    Raises:
        ValueError: if `~` names an unknown user.
    """
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        raise ValueError("there is no such user; write the whole path") from None
    # normpath, not resolve: the run folder may be a link whose target changes between resumes.
    return os.path.normpath(base / expanded)


def absolute_input(value: str, kind: InputKind, base: Path) -> str:
    """As `absolute_path`, for a value of a path type; handles, datasets and modules are unchanged.

    OWNER/NAME is a model on the Hugging Face hub where there is no folder OWNER.

    Raises:
        ValueError: as `absolute_path`.
    """
    file, colon, name = value.rpartition(":")
    if kind == "function":
        is_file = file.endswith(REWARD_FILE)
        return f"{absolute_path(file, base)}{colon}{name}" if is_file else value
    if kind == "model" and _HUB_NAME.fullmatch(value) and not (base / value).parent.exists():
        return f"{HUB_PREFIXES[0]}{value}"
    is_local = not _SCHEME.match(value) and (kind != "data" or is_data_file(value))
    return absolute_path(value, base) if is_local else value


def nearest_path(path: Path) -> Path | None:
    """The existing file or folder that the user may have meant by `path`; None if none is near."""
    parent = path.parent if path.parent.is_dir() else nearest_path(path.parent)
    if parent is None or not parent.is_dir():
        return None
    try:
        names = sorted(entry.name for entry in parent.iterdir())
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=1)
    return parent / close[0] if close else None


def nearest_hint(path: Path) -> str:
    """For the end of a message on a missing file or folder: what is there instead, or near it.

    `: it is a folder`, or `; nearest: PATH`; empty if nothing is near.
    """
    if path.exists() or path.is_symlink():
        is_file = "it is a file" if path.is_file() else "it is neither a file nor a folder"
        return f": {'it is a folder' if path.is_dir() else is_file}"
    nearest = nearest_path(path)
    return "" if nearest is None else f"; nearest: {nearest}"


def name_hint(name: str, known: Collection[str]) -> str:
    """`; nearest: 'NAME'` for a message on an unknown name; with all names if none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; nearest: {close[0]!r}" if close else f"; there are: {', '.join(known) or 'none'}"


def is_handle(path: str) -> bool:
    """Whether `path` is a hub model handle, not a folder."""
    return path.startswith(HUB_PREFIXES)


def _absolute(kind: InputKind) -> AfterValidator:
    return AfterValidator(lambda value: absolute_input(value, kind, home()))


def mirror_problem(url: str) -> str | None:
    """Describes what is wrong with the URL of a mirror; None if it is valid."""
    scheme, _, rest = url.partition("://")
    if not rest:
        return scheme_problem(url)
    if PASSWORD.search(url):
        return (
            "contains a user's key or password; set it in the environment, as the library of "
            f"{scheme}:// documents, and remove it from the URL"
        )
    if scheme == "hf" and not rest.startswith("buckets/"):
        return "hf:// needs a bucket, hf://buckets/USER/NAME: in a repository each file is a commit"
    return None


def absolute_url(url: str) -> str:
    """A URL without a slash at its end, or an absolute path."""
    return url.rstrip("/") if "://" in url else absolute_path(url, home())


# By `input`, `configs.load` finds the paths in a file.
OutputPath = Annotated[
    Text, checked(scheme_problem), AfterValidator(lambda path: absolute_path(path, output_home()))
]
MirrorURL = Annotated[Text, checked(mirror_problem), AfterValidator(absolute_url)]
FolderPath = Annotated[
    Text,
    Field(json_schema_extra={"input": "folder"}),
    checked(scheme_problem),
    _absolute("folder"),
]
DataPath = Annotated[
    Text, Field(json_schema_extra={"input": "data"}), checked(scheme_problem), _absolute("data")
]
ModelPath = Annotated[
    Text,
    Field(json_schema_extra={"input": "model"}),
    checked(lambda path: scheme_problem(path, HUB_PREFIXES)),
    _absolute("model"),
]
FunctionName = Annotated[
    str,
    Field(
        pattern=r"^([\w.]+|.+\.py):\w+$",
        json_schema_extra={"input": "function", "words": _FUNCTION},
    ),
    _absolute("function"),
]


def parse_duration_s(text: str) -> int:
    """Seconds in a duration such as `9h`, `1h30m` or `90s`.

    Raises:
        ValueError: if `text` has another form, or is zero.
    """
    match = _DURATION.fullmatch(text)
    amounts = match.groups(default="0") if match else ("0",) * len(_DURATION_UNITS_S)
    seconds = sum(int(n) * unit for n, unit in zip(amounts, _DURATION_UNITS_S, strict=True))
    if seconds == 0:
        raise ValueError(f"{text!r} is not a duration; write for example '9h', '1h30m' or '90s'")
    return seconds


def next_multiple(value: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that is not below `value`."""
    return -(-value // divisor) * divisor


def nearest_multiples(value: int, divisor: int) -> str:
    """The positive multiples of `divisor` next to `value`, in words."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"

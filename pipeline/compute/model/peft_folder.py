"""PEFT's adapter folders, `adapter_config.json` and `adapter_model.safetensors`: read, fit, write.

`fit_to_policy` checks an adapter against a policy and converts it; `projections.py` has the
conversion of the matrices.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from configs.schema import Lora
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.projections import Pair, Place, from_pairs, pair_shapes, rank_needed

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
TEXT, MULTIMODAL = "model.layers", "model.language_model.layers"
"""Path of the layers in Hugging Face's text and multimodal models."""

_KEY = re.compile(
    r"base_model\.model\.(?:language_model\.)?(?:model\.)?(?:language_model\.)?"
    r"layers\.(\d+)\."
    r"(self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj|per_layer_(?:input_gate|projection))"
    r"\.lora_([AB])(?:\.default)?\.weight"
)
# These initialisations change the base before training; the folder does not contain the change.
_CHANGES_BASE = ("pissa", "corda", "olora", "lora_ga")
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none",),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "use_qalora": (False, None),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
}


@dataclass(frozen=True)
class PeftAdapter:
    """The content of a PEFT folder.

    Attributes:
        folder: the folder.
        config: its `adapter_config.json`.
        pairs: float32 matrices of each projection.
    """

    folder: Path
    config: Mapping[str, Any]
    pairs: Mapping[Place, Pair]

    def scale(self, place: Place) -> float:
        """Factor of the product of a projection's two matrices."""
        rank, module = self.pairs[place][0].shape[0], f"{TEXT}.{place[0]}.{place[1]}"
        patterns = (self.config.get("alpha_pattern") or {}).items()
        alphas = [value for name, value in patterns if re.match(rf"(.*\.)?({name})$", module)]
        alpha = float(next(iter(alphas), self.config["lora_alpha"]))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def read_peft(folder: Path) -> PeftAdapter:
    """Reads a PEFT folder.

    Raises:
        FileNotFoundError: if one of its two files is missing.
        ValueError: if it is damaged, inconsistent, or not a plain LoRA of a Gemma's layers.
    """
    config = _read_config(folder / CONFIG)
    path = folder / TENSORS
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"lora.start: {path} is damaged: {error}") from None
    halves, problems = _halves(tensors)
    pairs = {place: (half["A"], half["B"]) for place, half in halves.items() if len(half) == 2}
    if not halves:
        problems.append("missing: lora_A and lora_B of any layer")
    if problems:
        raise ValueError(f"lora.start: {path} is no LoRA of a Gemma:\n  " + "\n  ".join(problems))
    return PeftAdapter(folder, config, pairs)


def full_name(place: Place) -> str:
    """Hugging Face's name of a projection."""
    return f"layers.{place[0]}.{place[1]}"


def fit_to_policy(peft: PeftAdapter, policy: Policy) -> dict[str, np.ndarray]:
    """A PEFT adapter in the policy's shapes; its change of the base is the same.

    Raises:
        ValueError: listing everything that does not fit the base or the `lora` settings.
    """
    shapes = {name: shape.shape for name, shape in policy.adapter_shapes.items()}
    problems = scale_problems(peft, policy.lora)
    adapter: dict[str, np.ndarray] = {}
    known: set[Place] = set()
    for matrix in (name.removesuffix("_lora_a") for name in shapes if name.endswith("_lora_a")):
        a, b = shapes[f"{matrix}_lora_a"], shapes[f"{matrix}_lora_b"]
        wanted = pair_shapes(matrix, a, b)
        known |= wanted.keys()
        pairs = {place: peft.pairs[place] for place in wanted if place in peft.pairs}
        wrong = _matrix_problems(matrix, pairs, wanted, max_rank=b[0], rank=policy.lora.rank)
        problems += wrong
        if not wrong:
            both = from_pairs(matrix, pairs, a=a, b=b)
            adapter |= {f"{matrix}_lora_{half}": x for half, x in zip("ab", both, strict=True)}
    targets = policy.lora.targets
    problems += [
        f"surplus: {full_name(place)}, which lora.targets = {targets!r} does not adapt in this base"
        for place in sorted(peft.pairs.keys() - known)
    ]
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(f"lora.start: {peft.folder} does not fit:\n  {lines}")
    return adapter


def _matrix_problems(
    matrix: str,
    pairs: Mapping[Place, Pair],
    wanted: Mapping[Place, tuple[int, int]],
    *,
    max_rank: int,
    rank: int,
) -> list[str]:
    """Reasons why these projections do not fit into a matrix with this maximum rank."""
    if not pairs:
        missing = " and ".join(full_name(place) for place in wanted)
        return [f"missing: {missing}, which lora.targets adapts"]
    problems = []
    for place, (a, b) in pairs.items():
        found, base = (a.shape[1], b.shape[0]), wanted[place]
        if found != base:
            problems.append(
                f"shape of {full_name(place)}: from {found[0]} to {found[1]}, in the base "
                f"from {base[0]} to {base[1]}"
            )
        if a.shape[0] not in {rank, max_rank}:
            problems.append(f"rank of {full_name(place)}: {a.shape[0]}, lora.rank is {rank}")
    if not problems and rank_needed(list(pairs.values())) > max_rank:
        problems.append(
            f"lora_A of the projections in {matrix} differ, which is supported only for the "
            "adapter of lora.start"
        )
    return problems


def scale_problems(peft: PeftAdapter, settings: Lora) -> list[str]:
    """A sentence if the adapter was trained with another scale than that of the settings."""
    scales = sorted({peft.scale(place) for place in peft.pairs})
    if all(math.isclose(scale, settings.scale, rel_tol=1e-6) for scale in scales):
        return []
    rank = settings.rank
    alpha = scales[0] * (math.sqrt(rank) if settings.scaling == "rslora" else rank)
    what = (
        f"scale: it was trained with {', '.join(f'{scale:g}' for scale in scales)}; lora.alpha = "
        f"{settings.alpha:g}, lora.rank = {rank} and lora.scaling = {settings.scaling!r} make "
        f"{settings.scale:g}; nearest valid: lora.alpha = {alpha:g}"
    )
    return [what]


def _halves(
    tensors: Mapping[str, np.ndarray],
) -> tuple[dict[Place, dict[str, np.ndarray]], list[str]]:
    """The matrices by projection and half, and problems of the keys."""
    halves: dict[Place, dict[str, np.ndarray]] = {}
    problems = []
    for key, value in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            problems.append(f"surplus: {key}")
        elif value.ndim != 2:
            problems.append(f"shape of {key}: {value.shape}, must be a matrix")
        else:
            place = Place(int(match[1]), match[2])
            halves.setdefault(place, {})[match[3]] = np.asarray(value, np.float32)
    problems += [
        f"missing: lora_{half} of {full_name(place)}"
        for place, found in halves.items()
        for half in "AB"
        if half not in found
    ]
    return halves, problems


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"lora.start: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"lora.start: {path} is not a JSON object")
    problems = [
        f"{key} is {config[key]!r}, must be {valid[0]!r}"
        for key, valid in _MUST_BE.items()
        if key in config and config[key] not in valid
    ]
    problems += [
        f"{key} is {config.get(key)!r}, must be a number above 0"
        for key in ("r", "lora_alpha")
        if not isinstance(config.get(key), int | float) or config[key] <= 0
    ]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        problems.append(f"init_lora_weights {start!r} changed the base it was trained on")
    if problems:
        raise ValueError(f"lora.start: {path}: " + "; ".join(problems))
    return config


def write_peft(
    folder: Path,
    pairs: Mapping[Place, Pair],
    *,
    lora: Lora,
    base: str,
    revision: str | None,
    layers: str,
) -> None:
    """Writes a PEFT folder.

    Args:
        folder: created if it does not exist.
        pairs: matrices of each adapted projection.
        lora: rank and scale of the training.
        base: name of the base model.
        revision: of the base model, if known.
        layers: path of the base model's layers: `TEXT` or `MULTIMODAL`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for place, pair in pairs.items():
        module = f"{layers}.{place.layer}.{place.projection}"
        for half, value in zip("AB", pair, strict=True):
            key = f"base_model.model.{module}.lora_{half}.weight"
            tensors[key] = np.ascontiguousarray(value, np.float32)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    # Projections with separate lora_A in one matrix of ours, see `projections.py`.
    ranks = {
        place.projection.split(".")[-1]: pair[0].shape[0]
        for place, pair in pairs.items()
        if pair[0].shape[0] != lora.rank
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.scaling == "rslora",
        "rank_pattern": ranks,
        "alpha_pattern": {
            name: lora.scale * (math.sqrt(rank) if lora.scaling == "rslora" else rank)
            for name, rank in ranks.items()
        },
        "target_modules": target_modules(list(pairs), layers=layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def target_modules(places: Sequence[Place], *, layers: str) -> list[str]:
    """PEFT's `target_modules` for exactly these projections.

    The last parts of the names if every layer of a text model has the same projections; otherwise
    full names, because a multimodal model's vision tower has projections with the same names.
    """
    by_layer: dict[int, set[str]] = {}
    for place in places:
        by_layer.setdefault(place.layer, set()).add(place.projection)
    everywhere = set.intersection(*by_layer.values())
    alike = all(found == everywhere for found in by_layer.values())
    if layers == TEXT and alike and sorted(by_layer) == list(range(len(by_layer))):
        return sorted(projection.split(".")[-1] for projection in everywhere)
    return [f"{layers}.{place.layer}.{place.projection}" for place in sorted(places)]

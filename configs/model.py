"""Settings of the frozen base model, the LoRA adapter and the export."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field

from configs.base import FREE, FolderPath, ModelPath, Table, Text, checked, regex_problem


class Model(Table):
    """The frozen base model."""

    path: ModelPath = Field(
        description="folder of a Hugging Face or Kaggle (flax) checkpoint or of an export, or "
        "hf://OWNER/NAME[@REVISION] or kaggle://OWNER/MODEL/flax|transformers/VARIATION[/VERSION]"
    )
    tokenizer: ModelPath | None = Field(
        None,
        description="file tokenizer.model or tokenizer.json, or the folder of one; default: "
        "model.path",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16",
        description="data type of the frozen base and of the computation",
        json_schema_extra={"implied": '"bfloat16", on cpu "float32"'},
    )
    quantization: Literal["none", "int8", "nf4", "int8_matmul"] = Field(
        "none",
        description="store the base's matrices in 8 or 4 bits (QLoRA, arXiv:2305.14314); "
        "int8_matmul: int8 weights with one scale per output channel and int8 activations with one "
        "scale per token, multiplied as integers in sampler and learner (LLM.int8(), "
        "arXiv:2208.07339)",
    )


class Lora(Table):
    """The trained adapter (LoRA, arXiv:2106.09685), always float32."""

    rank: int = Field(32, ge=1, le=16_384, description="rank of each adapted matrix")
    alpha: float = Field(
        64.0, gt=0, le=65_536, description="LoRA alpha; the update is scaled by alpha / rank"
    )
    scaling: Literal["standard", "rslora"] = Field(
        "standard",
        description="standard: scale by alpha / rank; rslora: scale by alpha / sqrt(rank) "
        "(arXiv:2312.03732)",
    )
    targets: Annotated[Text, checked(regex_problem)] = Field(
        "all",
        description="attention, mlp, per_layer (Gemma 4) or all matrices of each layer, or a "
        r"regular expression that matches whole module paths such as layers/\d+/attn/q_einsum",
    )
    start: FolderPath | None = Field(
        None,
        description="initial adapter: a PEFT folder, a run folder or an export; default: a new "
        "adapter, which is the identity",
    )

    @property
    def scale(self) -> float:
        """Factor of the product of the two LoRA matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)


Format = Literal["hf", "peft", "orbax"]
"""A format of an export."""
FORMATS: tuple[Format, ...] = get_args(Format)
"""In the order of writing."""


class Export(Table):
    """How the merged model is written."""

    model_config = ConfigDict(json_schema_extra=FREE)

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="data type of the written weights; default: model.dtype"
    )

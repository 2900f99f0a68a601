"""The tokenizer files of an export: transformers must read our token ids from them. No JAX."""

from __future__ import annotations

import json
import os
from pathlib import Path

import tokenizers
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import decoders, models, normalizers, processors

from pipeline.data.text.chat import TEMPLATE_FILE, Turns, in_turns
from pipeline.data.text.tokenizer import CHANNEL, MARKERS, Tokenizer
from pipeline.data.text.tokenizer_files import JSON

_SETTINGS = "tokenizer_config.json"
_TEMPLATE = (
    "{{ bos_token }}{% set opens = not HAS_SYSTEM and messages[0]['role'] == 'system' %}"
    "{% for message in (messages[1:] if opens else messages) %}"
    "{{ 'START' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{{ messages[0]['content'] + '\\n\\n' if opens and loop.first else '' }}"
    "{{ message['content'] + 'END\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'STARTmodel\\n' }}{% endif %}"
)
"""Gemma's turns. Without a turn of the system its text begins the first turn of the user."""
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", *MARKERS, *CHANNEL)
_TEXTS = (
    "What is 1,234 + 56.7?",
    "  two  spaces\n\n\nthree lines\tand a tab\n",
    "é ☃ 漢字 🙂",
    "<reasoning>a</reasoning><answer>12</answer>",
)


def write_unigram_json(folder: Path, *, model: Path) -> None:
    """Writes `tokenizer.json` if `model` is a SentencePiece unigram model.

    Without it transformers takes every `tokenizer.model` of a Gemma for byte-pair encoding, as
    those of Google are.
    """
    pieces = proto.ModelProto.FromString(model.read_bytes())
    kinds = proto.ModelProto.SentencePiece
    if pieces.trainer_spec.model_type != proto.TrainerSpec.UNIGRAM:
        return
    scores = [(piece.piece, piece.score) for piece in pieces.pieces]
    whole = tokenizers.Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=True))
    whole.normalizer = normalizers.Replace(" ", "\u2581")
    whole.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = [
        tokenizers.AddedToken(piece.piece, normalized=False, special=piece.piece in _SPECIAL)
        for piece in pieces.pieces
        if piece.type == kinds.USER_DEFINED or piece.piece in _SPECIAL
    ]
    whole.add_tokens(added)
    bos = _SPECIAL[2]  # begins a text, as with Google's tokenizers
    whole.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, whole.token_to_id(bos))],
    )
    whole.save(str(folder / JSON))
    path = folder / _SETTINGS
    given = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    named = {f"{piece.strip('<>')}_token": piece for piece in _SPECIAL[:4]}
    settings = {**given, **named, "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_chat_template(folder: Path, turns: Turns) -> None:
    """Writes the turns of a run whose model has no chat template, for the users of its export."""
    text = _TEMPLATE.replace("START", turns.start).replace("END", turns.end)
    text = text.replace("HAS_SYSTEM", str(turns.has_system).lower())
    (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")


def check_exported(folder: Path, tokenizer: Tokenizer) -> None:
    """Compares token ids that transformers reads from an export with those of the run.

    Imports transformers, which takes seconds. The folder has a `config.json`.

    Raises:
        RuntimeError: if transformers cannot read the tokenizer or the chat template, or reads other
            ids for one of a few texts.
    """
    # Without torch the import would print a warning.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    turns, template = tokenizer.turns, tokenizer.chat_template
    texts = [*_TEXTS, f"{turns.start}user\nHi{turns.end}\n{turns.start}model\n"]
    try:
        theirs = AutoTokenizer.from_pretrained(folder)
        found = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
        expected = [tokenizer.encode(text).tolist() for text in texts]
        if theirs.chat_template is not None:
            message = {"role": "user", "content": _TEXTS[0]}
            text = theirs.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
            texts.append(text)
            found.append(theirs(text, add_special_tokens=False)["input_ids"])
            dialogue = [("user", _TEXTS[0])]
            rendered = template.render(dialogue) if template else in_turns(dialogue, turns)
            expected.append([tokenizer.bos_id, *tokenizer.encode(rendered).tolist()])
    except Exception as error:  # transformers may raise anything
        raise RuntimeError(
            f"transformers cannot read the tokenizer in {folder}: {error}"
        ) from error
    for text, ids, ours in zip(texts, found, expected, strict=True):
        if ids != ours:
            raise RuntimeError(
                f"transformers reads other token ids from the tokenizer in {folder}: {text!r} is "
                f"{ids} there, and {ours} in the run"
            )

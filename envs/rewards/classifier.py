"""Classifier: a reward from a sequence classifier of transformers, such as a reward model or a filter."""

from __future__ import annotations

import inspect
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

if TYPE_CHECKING:  # a config is checked without them
    import torch

COUNTS = ("scored", "truncated")


class Classifier:
    """A callable that gives each response to a question the classifier's logit, or the probability of one label.

    One logit, as it is, is what TorchRL's ``HFRewardModelWrapper`` gives; that brings vLLM, and has no labels.

    The model reads its own chat template's text of both, else both as a pair. Only texts of one length are computed
    together, so that nothing is padded: a value does not depend on the other responses.

    Args:
        name: of the model, a folder or a hub name; no code of a repository's own is run.
        label: the label whose probability is the value, by its name or number; None where there is one logit.
        sigmoid: turns one logit into a value between 0 and 1.
        max_tokens: tokens of question and response that are read, from the first; None: as many as the model takes.
        batch: texts computed at the same time.
        dtype: of weights and activations.
        revision: commit, tag or branch of the hub's model.
        num_devices: 1: a GPU of its own in the device plan; None: it shares the training device.
        devices: the index of its GPU, as a list of one, instead of ``num_devices``.

    Raises:
        ValueError: a setting makes no sense.
    """

    def __init__(
        self,
        *,
        name: str,
        label: str | int | None = None,
        sigmoid: bool = False,
        max_tokens: Annotated[int, Field(ge=1)] | None = None,
        batch: Annotated[int, Field(ge=1)] = 8,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        revision: str | None = None,
        num_devices: int | None = None,
        devices: Sequence[int] | None = None,
    ) -> None:
        if num_devices not in (None, 1) or (devices is not None and len(devices) != 1):
            raise ValueError(f"num_devices={num_devices}, devices={devices}; the classifier takes one device")
        self._name, self._label, self._sigmoid, self._max_tokens, self._batch = name, label, sigmoid, max_tokens, batch
        self._dtype, self._revision = dtype, revision
        self._loading, self._counts = threading.Lock(), dict.fromkeys(COUNTS, 0.0)
        self._device: Any = "cpu"
        self._model: Any = None

    def place(self, device: Any) -> None:
        """Loads the model on a device, before the deadline of a scorer begins.

        Raises:
            ValueError: there is no such model, or it has not the label.
        """
        self._device, self._model = device, None
        self._loaded()

    def counts(self) -> dict[str, float]:
        """The number of responses scored since the start of the run, and of those cut at the model's length."""
        return {f"reward_model/{name}": value for name, value in self._counts.items()}

    def restore(self, counts: Mapping[str, float]) -> None:
        """Goes on counting from :meth:`counts`."""
        self._counts = {name: counts.get(f"reward_model/{name}", 0.0) for name in COUNTS}

    def __call__(self, questions: Sequence[str], responses: Sequence[str]) -> list[float]:
        """The value of each response."""
        import torch

        model = self._loaded()
        texts = [self._encode(question, text) for question, text in zip(questions, responses, strict=True)]
        by_length: dict[int, list[int]] = defaultdict(list)
        for at, text in enumerate(texts):
            by_length[len(text["input_ids"])].append(at)
        values = [0.0] * len(texts)
        for same in by_length.values():
            for start in range(0, len(same), self._batch):
                chosen = same[start : start + self._batch]
                names = texts[chosen[0]]
                inputs = {name: torch.tensor([texts[at][name] for at in chosen], device=self._device) for name in names}
                with torch.no_grad():
                    logits = model(**inputs).logits.float()
                for at, value in zip(chosen, self._values(logits).tolist(), strict=True):
                    values[at] = value
        self._counts["scored"] += len(texts)
        return values

    def _encode(self, question: str, response: str) -> dict[str, list[int]]:
        """The ids of both texts, with what else the model reads of each token, cut at the longest that it takes."""
        if self._tokenizer.chat_template:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
            text: Any = {"input_ids": self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)}
        else:
            text = self._tokenizer(question, response)
        self._counts["truncated"] += len(text["input_ids"]) > self._longest
        return {name: list(text[name])[: self._longest] for name in self._inputs if name in text}

    def _loaded(self) -> Any:
        with self._loading:
            if self._model is None:
                import torch
                from transformers import AutoModelForSequenceClassification, AutoTokenizer

                from grpo_rl.storage.hub import why_no_hub

                if not os.path.isdir(self._name):
                    why_no_hub()  # without a network transformers looks into the cache at once
                try:
                    self._tokenizer: Any = AutoTokenizer.from_pretrained(self._name, revision=self._revision)
                    model = AutoModelForSequenceClassification.from_pretrained(
                        self._name, revision=self._revision, dtype=getattr(torch, self._dtype)
                    )
                except OSError as error:
                    raise ValueError(f"env.rewards.model: {self._name} can't be loaded: {error}") from error
                model.to(self._device).eval().requires_grad_(False)
                limits = (self._max_tokens, getattr(model.config, "max_position_embeddings", None))
                if model.config.get_text_config().pad_token_id is None:
                    self._batch = 1  # transformers' classifiers of decoders refuse more, also where nothing is padded
                self._longest = min(limit for limit in (*limits, self._tokenizer.model_max_length) if limit)  # pyrefly: ignore[missing-attribute]
                takes = inspect.signature(model.forward).parameters
                self._inputs = [name for name in ("input_ids", "token_type_ids") if name in takes]
                self._chosen, self._model = self._number(model.config), model
            return self._model

    def _values(self, logits: torch.Tensor) -> torch.Tensor:
        if self._chosen is not None:
            return logits.softmax(-1)[:, self._chosen]
        return logits[:, 0].sigmoid() if self._sigmoid else logits[:, 0]

    def _number(self, config: Any) -> int | None:
        names = {int(number): str(name) for number, name in config.id2label.items()}
        if config.num_labels == 1 and self._label is None:
            return None
        found = [number for number, name in names.items() if self._label in (number, name)]
        if config.num_labels == 1 or not found:
            labels = ", ".join(names.values())
            what = "one logit; leave label out" if config.num_labels == 1 else f"the labels {labels}; choose one"
            raise ValueError(f"env.rewards.model: label={self._label}, and {self._name} has {what}")
        if self._sigmoid:
            raise ValueError(f"env.rewards.model: sigmoid=true, and {self._name} has several logits")
        return found[0]

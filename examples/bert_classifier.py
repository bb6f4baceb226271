"""A BERT classifier of Hugging Face transformers, pruned while its Trainer fine-tunes it.

    pip install 'dsa-hw[transformers]'
    python examples/bert_classifier.py flops=60%

The network is small, its weights are random and the sentences are made up. For your own network use from_pretrained and
your tokenised data set.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from typing import Any

import dsa_hw
import torch
import transformers
from dsa_hw.integrations.transformers import AllocationCallback

WORDS, LENGTH = 60, 12


def sentences(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return sentences of random words; the label says which half of the vocabulary is more frequent."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (count, LENGTH), generator=rng)
    labels = (ids >= WORDS // 2).sum(1) > LENGTH // 2
    ones = torch.ones(LENGTH, dtype=torch.long)
    rows = zip(ids, labels.long(), strict=True)
    return [{"input_ids": x, "attention_mask": ones, "labels": y} for x, y in rows]


def batched(rows: list[dict[str, Any]], size: int = 32) -> list[dict[str, torch.Tensor]]:
    """Return batches as a DataLoader makes them."""
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


def main(budget: str = "flops=60%", *, epochs: float = 4, count: int = 512) -> dsa_hw.Allocation:
    """Train with the callback, cut and certify, and print the accuracies."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        num_labels=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    example = (torch.zeros(1, LENGTH, dtype=torch.long), torch.ones(1, LENGTH, dtype=torch.long))
    val, test = batched(sentences(count // 4, seed=1)), batched(sentences(count // 4, seed=2))
    callback = AllocationCallback(budget, example, val, steps=30)
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder, num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=2e-3,
            report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        dense = copy.deepcopy(model)
        transformers.Trainer(model=dense, args=settings, train_dataset=sentences(count)).train()
        model.load_state_dict(dense.state_dict())
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=sentences(count), callbacks=[callback])
        trainer.train()
    result = dsa_hw.allocate(dense, budget, example_inputs=example, val=val, method=callback.proposal)
    result = result.assess(dense, test, source="test data")
    print(result)
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])

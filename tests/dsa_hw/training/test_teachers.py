"""Teachers: what is learnt, when they are used, and that they do not change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dsa_hw.errors import TrainingError
from dsa_hw.training.distillation import distillation_loss
from dsa_hw.training.finetune import finetune
from dsa_hw.training.losses import checked_loss
from dsa_hw.training.teachers import Teacher, as_teacher, taught_loss, useful_teacher
from tests.fakes.loaders import Interrupting
from tests.fakes.networks import Small, batches, trained


def student() -> nn.Module:
    torch.manual_seed(1)
    return Small()


def test_loss_is_the_weighted_sum_of_its_parts() -> None:
    dense, small, batch = trained(), student().eval(), batches(1)[0]
    outputs, wanted = small(batch[0]), dense(batch[0])
    for weight in (0.0, 0.3, 1.0):
        found = taught_loss(small, batch, functional.cross_entropy, as_teacher(Teacher(dense, weight, temperature=2.0)))
        alone = functional.cross_entropy(outputs, batch[1])
        expected = (1 - weight) * alone + weight * distillation_loss(outputs, wanted, 2.0)
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    plain = taught_loss(small, batch, functional.cross_entropy, None)
    assert torch.equal(plain, checked_loss(small, batch, functional.cross_entropy))


def test_outputs_of_the_teacher_are_learnt_from_wrong_labels() -> None:
    """With all the weight on the teacher, labels have no effect."""
    dense, data = trained(), batches(6)
    results = []
    for labels in (0, 3):
        small = student()
        wrong = [(x, torch.full_like(y, labels)) for x, y in data]
        finetune(small, wrong, 8, lr=0.1, teacher=Teacher(dense, weight=1.0))
        results.append(small.eval())
    same = [torch.equal(a, b) for a, b in zip(*(r.state_dict().values() for r in results), strict=True)]
    assert all(same)
    x = torch.cat([x for x, _ in batches(4, seed=7)])
    with torch.no_grad():
        assert (results[0](x).argmax(1) == dense(x).argmax(1)).float().mean() > 0.8


def test_teacher_is_not_changed_and_may_be_the_network_itself() -> None:
    dense = trained().train()
    before = copy.deepcopy(dense.state_dict())
    finetune(student(), batches(4), 1, teacher=dense)
    assert dense.training
    assert all(p.requires_grad for p in dense.parameters())
    assert all(torch.equal(a, b) for a, b in zip(dense.state_dict().values(), before.values(), strict=True))
    teacher = as_teacher(dense)
    assert teacher is not None
    finetune(dense, batches(4), 1, teacher=Teacher(dense, weight=1.0))
    assert all(torch.equal(a, b) for a, b in zip(teacher.model.state_dict().values(), before.values(), strict=True))


def test_only_a_better_network_is_a_teacher(caplog: pytest.LogCaptureFixture) -> None:
    loss, data = functional.cross_entropy, batches(4)
    good, poor = as_teacher(trained()), as_teacher(student())
    assert useful_teacher(good, student(), data, loss) is good
    assert useful_teacher(poor, trained(), data, loss) is None
    assert "not used as a teacher" in caplog.text
    torch.manual_seed(5)
    assert useful_teacher(poor, Small(), data, loss) is None, "two networks of random weights"
    assert useful_teacher(None, student(), data, loss) is None
    alone, taught = student(), student()
    finetune(alone, data, 1)
    finetune(taught, data, 1, teacher=taught)
    assert torch.equal(alone.linear.weight, taught.linear.weight)


class Detector(nn.Module):
    """Boxes alone in evaluation mode, and a dict with an auxiliary output in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        boxes = self.body(x)
        return {"boxes": boxes, "aux": self.aux(x)} if self.training else boxes


def detection_loss(outputs: Any, targets: Tensor) -> Tensor:
    boxes = outputs["boxes"] if isinstance(outputs, dict) else outputs
    return (boxes - targets).abs().mean()


def test_detectors_are_compared_by_the_function_of_the_user() -> None:
    torch.manual_seed(0)
    dense, small = Detector().eval(), Detector()
    data = [(x, torch.zeros(32, 4)) for x in torch.randn(5, 32, 6)]
    with pytest.raises(TrainingError, match=r"Teacher\(model, loss="):
        finetune(small, data, 1, loss=detection_loss, teacher=Teacher(dense, weight=1.0))
    teacher = Teacher(dense, weight=1.0, loss=detection_loss)
    before = float(detection_loss(small.eval()(data[0][0]), dense(data[0][0])).detach())
    finetune(small, data, 30, loss=detection_loss, lr=0.1, teacher=teacher)
    assert float(detection_loss(small.eval()(data[0][0]), dense(data[0][0])).detach()) < 0.2 * before


def test_interrupted_training_continues_with_its_teacher_and_no_other(tmp_path: Path) -> None:
    dense = trained()
    whole = student()
    finetune(whole, batches(10), 3, teacher=dense)
    with pytest.raises(KeyboardInterrupt):
        finetune(student(), Interrupting(batches(10), at=14), 3, teacher=dense, folder=tmp_path)
    again = student()
    finetune(again, Interrupting(batches(10), at=0), 3, teacher=dense, folder=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    for other in (None, Teacher(dense, weight=0.5)):
        with pytest.raises(TrainingError, match="teacher="):
            finetune(student(), Interrupting(batches(10), at=0), 3, teacher=other, folder=tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"model": "dense"}, "must be a network"), ({"weight": 1.5}, "`weight`"), ({"temperature": 0}, "`temperature`")],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        Teacher(**{"model": nn.Linear(2, 2), **settings})

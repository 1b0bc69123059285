import torch

from spurline.data.batch import Batch, Images


def test_every_tensor_of_a_batch_is_pinned_and_copied_without_waiting(monkeypatch) -> None:
    pinned, copied = [], []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tuple(tensor.shape))
        return tensor.clone()

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        copied.append((tuple(tensor.shape), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    tokens_BL = torch.zeros(2, 3, dtype=torch.int64)
    batch = Batch(tokens_BL, tokens_BL + 1, Images(torch.zeros(4, 5), ()), tokens_BL + 2).pin_memory()
    batch.to(torch.device("cpu"))
    shapes = [(2, 3)] * 3 + [(4, 5)]
    assert sorted(pinned) == shapes
    assert sorted(copied) == [(shape, True) for shape in shapes]
    assert [t[0, 0].item() for t in (batch.tokens_BL, batch.labels_BL, batch.documents_BL)] == [0, 1, 2]

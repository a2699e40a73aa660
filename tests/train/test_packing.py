import pytest
import torch
from torch import Tensor

from moonlet.core.errors import ConfigError
from moonlet.kernels import _native
from moonlet.kernels.registry import resolve
from moonlet.model.transformer import Transformer
from moonlet.testing.tiny import tiny_config, tiny_model
from moonlet.train.loss import loss_sum
from moonlet.train.packing import Document, pack

FAST = {"mla_prefill": "blockwise", "moe_experts": "sorted"}
NATIVE = {
    "gated_rms_norm": "native",
    "attn_res_mix": "native",
    "short_conv": "native",
    "kda_chunk": "native",
    "situ_glu": "native",
}


def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for length in (2, 37, 70, 5):
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) < 0.6).tolist()
        mask[-1] = True
        made.append(Document(tuple(ids), tuple(mask)))
    return made


def test_labels_are_the_next_supervised_tokens() -> None:
    first = Document((1, 2, 3, 4), (True, False, True, True))
    second = Document((5, 6), (True, True))
    batch = pack([second, first])
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.meta.seq_lens == (4, 2)
    # row 0 predicts a masked token, row 3 and row 5 end their documents
    assert batch.meta.logits_at_Q.tolist() == [1, 2, 4]
    assert batch.labels_Q.tolist() == [3, 4, 6]


def test_unusable_documents_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 ids but 2"):
        Document((1, 2, 3), (True, True))
    with pytest.raises(ConfigError, match="at least two"):
        Document((1,), (True,))
    with pytest.raises(ConfigError, match="empty"):
        pack([])
    with pytest.raises(ConfigError, match="supervised"):
        pack([Document((1, 2), (True, False))])


def gradients(model: Transformer, batches: list[list[Document]]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        loss_sum(model, pack(batch)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("wanted", ["reference", "fast", "native"])
def test_a_packed_batch_equals_its_documents(wanted: str) -> None:
    if wanted == "native" and not _native.availability()[0]:
        pytest.skip(_native.availability()[1])
    table = {"reference": {}, "fast": FAST, "native": {**FAST, **NATIVE}}[wanted]
    model = Transformer(tiny_config(), resolve("cpu", None, table))
    model.load_state_dict(tiny_model().state_dict())
    parts = documents()
    together, apart = pack(parts), [pack([d]) for d in parts]
    with torch.no_grad():
        packed_loss = loss_sum(model, together)
        separate_loss = sum(loss_sum(model, x) for x in apart)
    torch.testing.assert_close(packed_loss, separate_loss, rtol=1e-5, atol=1e-5)
    packed = gradients(model, [parts])
    separate = gradients(model, [[d] for d in parts])
    assert packed.keys() == separate.keys()
    unused = {n for n, _ in model.named_parameters()} - packed.keys()
    assert unused == {f"layers.0.self_attention_res_{x}.weight" for x in ("norm", "proj")}
    for name, expected in separate.items():
        scale = float(expected.abs().max()) + 1e-3
        assert float((packed[name] - expected).abs().max()) < 1e-5 * max(1.0, scale), name

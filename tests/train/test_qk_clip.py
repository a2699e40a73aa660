import torch
from torch import Tensor

from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from moonlet.testing.tiny import tiny_config, tiny_model
from moonlet.train.qk_clip import QKClip


def watched(tau: float) -> tuple[Transformer, QKClip, list[Tensor]]:
    """A tiny model with large query weights and a record of every head's largest logit."""
    model = tiny_model()
    model.train()
    attention = model.layers[3].self_attn
    attention.q_b_proj.weight.data[24:] *= 40.0
    clip = QKClip({"mla": attention}, tiny_config().mla, tau)
    observe, seen = attention.max_logit_observer, []

    def record(max_logits_H: Tensor) -> None:
        seen.append(max_logits_H.clone())
        observe(max_logits_H)

    attention.max_logit_observer = record
    return model, clip, seen


def forward(model: Transformer) -> Tensor:
    tokens = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens, BatchMeta.build([12, 8]), NoState(model.config))


def test_clipped_heads_end_at_the_bound_and_others_stay() -> None:
    model, clip, seen = watched(tau=5.0)
    forward(model)
    assert seen[0][1] > 5.0 > seen[0][0]
    assert clip.max_logit == float(seen[0].max())
    values = model.layers[3].self_attn.kv_b_proj.weight.data.view(2, 28, 24)[:, 16:].clone()
    shared = model.layers[3].self_attn.kv_a_proj_with_mqa.weight.data.clone()
    assert clip.apply() == 1
    forward(model)
    assert abs(float(seen[1][1]) - 5.0) < 1e-3
    assert torch.equal(seen[1][0], seen[0][0])
    attention = model.layers[3].self_attn
    assert torch.equal(attention.kv_b_proj.weight.data.view(2, 28, 24)[:, 16:], values)
    assert torch.equal(attention.kv_a_proj_with_mqa.weight.data, shared)


def test_maxima_accumulate_over_micro_batches_and_clear_with_the_step() -> None:
    model, clip, seen = watched(tau=1e9)
    forward(model)
    model.layers[3].self_attn.q_b_proj.weight.data *= 0.5
    forward(model)
    assert clip.max_logit == float(seen[0].max()) > float(seen[1].max())
    before = model.layers[3].self_attn.q_b_proj.weight.data.clone()
    assert clip.apply() == 0
    assert torch.equal(model.layers[3].self_attn.q_b_proj.weight.data, before)
    assert clip.max_logit == -torch.inf


def test_evaluation_is_not_observed() -> None:
    model, clip, _ = watched(tau=5.0)
    model.eval()
    forward(model)
    assert clip.max_logit == -torch.inf

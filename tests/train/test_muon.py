import pytest
import torch
from torch import Tensor, nn

from moonlet.model.transformer import Transformer
from moonlet.testing.tiny import tiny_config, tiny_model
from moonlet.train.flat import FlatModel
from moonlet.train.groups import assign_groups, block_views
from moonlet.train.muon import MUON_KINDS, PerHeadMuon, newton_schulz
from moonlet.train.optimizer import ModelOptimizer, OptimizerOptions


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 32, 128), (3, 64, 96), (2, 16, 64)])
def test_singular_values_end_in_the_band(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(newton_schulz(random(*shape)))
    assert values.min() > 0.65
    assert values.max() < 1.15


def test_blocks_of_a_stack_do_not_influence_each_other() -> None:
    blocks = random(4, 8, 24)
    alone = newton_schulz(blocks[2:3])
    scaled = blocks * torch.tensor([1.0, 1e3, 1.0, 1e-3])[:, None, None]
    torch.testing.assert_close(newton_schulz(scaled)[2:3], alone, rtol=1e-5, atol=1e-6)


def test_direction_does_not_depend_on_the_scale() -> None:
    blocks = random(2, 8, 24)
    torch.testing.assert_close(
        newton_schulz(blocks * 1e-3), newton_schulz(blocks), rtol=1e-3, atol=1e-4
    )


def prepared() -> tuple[Transformer, FlatModel]:
    model = tiny_model()
    flat = FlatModel(model, assign_groups(model, tiny_config()))
    flat.gradients.copy_(random(flat.gradients.numel(), seed=1))
    return model, flat


def test_the_update_has_the_same_size_whatever_the_block_shape() -> None:
    _, flat = prepared()
    before = flat.values.clone()
    PerHeadMuon(flat, weight_decay=0.0).step(lr=1.0)
    for span in flat.of_kind(*MUON_KINDS):
        rms = float((span.view(flat.values) - span.view(before)).square().mean().sqrt())
        p, q = sorted(next(block_views(span.assignment, span.view(before))).shape[1:])
        # nominal 0.2 times singular values of the band; square blocks keep small ones
        low = 0.2 * 0.68 if q >= 2 * p else 0.1
        assert low < rms < 0.2 * 1.15, span.assignment.name


def test_each_head_is_orthogonalised_on_its_own() -> None:
    model, flat = prepared()
    name = "layers.0.self_attn.q_proj.weight"
    (span,) = [s for s in flat.spans if s.assignment.name == name]
    gradient = span.view(flat.gradients)
    gradient[:16] *= 1e4
    before = span.view(flat.values).clone()
    PerHeadMuon(flat, weight_decay=0.0).step(lr=1.0)
    update = before - model.layers[0].self_attn.q_proj.weight.data
    heads = update.view(2, 16, 32) / (0.2 * 32**0.5)
    expected = newton_schulz(gradient.view(2, 16, 32))
    torch.testing.assert_close(heads, expected, rtol=1e-4, atol=1e-4)
    # one matrix of both heads would leave the second head's update near zero
    assert heads[1].norm() > 0.5 * heads[0].norm()


def test_momentum_and_decay_follow_the_equations() -> None:
    for nesterov in (True, False):
        _, flat = prepared()
        name = "layers.0.ffn.up_proj.weight"
        (span,) = [s for s in flat.spans if s.assignment.name == name]
        muon = PerHeadMuon(flat, momentum=0.9, weight_decay=0.5, nesterov=nesterov)
        weight, buffer = span.view(flat.values).clone(), torch.zeros(span.shape)
        for step in range(2):
            flat.gradients.copy_(random(flat.gradients.numel(), seed=step))
            gradient = span.view(flat.gradients)
            buffer = 0.9 * buffer + gradient
            direction = gradient + 0.9 * buffer if nesterov else buffer
            update = 0.2 * 64**0.5 * newton_schulz(direction.mT[None])[0].mT
            weight = weight * (1 - 0.1 * 0.5) - 0.1 * update
            muon.step(lr=0.1)
        torch.testing.assert_close(span.view(flat.values), weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(muon.named_momenta()[name], buffer)


class Share:
    """One of two processes that run one after the other: sums what both wrote."""

    world_size = 2

    def __init__(self, rank: int, earlier: list[Tensor]) -> None:
        self.rank = rank
        self._earlier = earlier

    def sum_(self, tensor: Tensor) -> None:
        if self.rank == 0:
            self._earlier.append(tensor.clone())
        else:
            tensor.add_(self._earlier.pop(0))


def test_sharing_the_blocks_changes_no_bit() -> None:
    _, alone = prepared()
    PerHeadMuon(alone).step(lr=0.1)
    parts: list[Tensor] = []
    for rank in range(2):
        _, flat = prepared()
        PerHeadMuon(flat).step(0.1, Share(rank, parts))
    assert torch.equal(flat.values, alone.values)


def test_gradients_land_in_the_flat_buffer() -> None:
    model = nn.Module()
    model.embed_tokens = nn.Embedding(4, 3)
    flat = FlatModel(model, assign_groups(model, tiny_config()))
    model.embed_tokens.weight[1].sum().backward()
    assert flat.gradients.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_the_clip_bounds_the_mean_gradient() -> None:
    model = tiny_model()
    assignments = assign_groups(model, tiny_config())
    optimizer = ModelOptimizer(model, assignments, OptimizerOptions(clip_norm=1.0))
    flat = optimizer.flat
    flat.gradients.fill_(2.0)
    norm = optimizer.scale_and_clip(num_targets=4)
    assert norm == pytest.approx(0.5 * flat.gradients.numel() ** 0.5, rel=1e-5)
    assert float(flat.gradients.norm()) == pytest.approx(1.0, rel=1e-4)


def test_adamw_decays_matrices_and_spares_vectors() -> None:
    model = tiny_model()
    assignments = assign_groups(model, tiny_config())
    optimizer = ModelOptimizer(model, assignments, OptimizerOptions(weight_decay=0.5))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.zero_gradients()
    optimizer.step(lr=0.1)
    after = dict(model.named_parameters())
    for name in ("embed_tokens.weight", "lm_head.weight", "layers.0.ffn.up_proj.weight"):
        torch.testing.assert_close(after[name].data, before[name] * 0.95)
    for name in ("norm.weight", "layers.0.self_attn.A_log", "layers.0.self_attn.dt_bias"):
        assert torch.equal(after[name].data, before[name])
    query = "layers.1.mlp_res_proj.weight"
    assert torch.equal(after[query].data, before[query])

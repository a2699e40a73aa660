import pytest
import torch
from torch import Tensor, nn

from moonlet.core.errors import ConfigError
from moonlet.train.quantile_balancing import (
    QuantileBalancer,
    exact_bias,
    histogram_bias,
    histogram_counts,
    histogram_range,
)

# training.md section 3.2: eight tokens, four experts, one expert per token
SCORES_TE = torch.tensor(
    [
        [0.9, 0.6, 0.5, 0.1],
        [0.8, 0.7, 0.3, 0.2],
        [0.9, 0.5, 0.4, 0.3],
        [0.7, 0.6, 0.5, 0.4],
        [0.4, 0.8, 0.5, 0.3],
        [0.5, 0.9, 0.6, 0.2],
        [0.3, 0.7, 0.6, 0.5],
        [0.2, 0.3, 0.8, 0.6],
    ]
)


class FakeRouter(nn.Module):
    """Top-k router over given scores."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))
        self.observer = None
        self.top_k = top_k

    def route(self, scores_TE: Tensor) -> Tensor:
        """Return the load of every expert."""
        biased_TE = scores_TE + self.e_score_correction_bias
        best = biased_TE.topk(self.top_k + 1, dim=-1)
        if self.observer is not None:
            self.observer(scores_TE, best.values[:, -1])
        chosen = best.indices[:, : self.top_k].flatten()
        return torch.bincount(chosen, minlength=scores_TE.shape[1])


def skewed_scores(seed: int, num_tokens: int, num_experts: int, dead: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    preference = torch.randn(num_experts, generator=torch.Generator().manual_seed(99))
    preference[:dead] -= 3
    return torch.sigmoid(logits + preference)


def test_unit_vector() -> None:
    bias_E = exact_bias(SCORES_TE, torch.zeros(4), 1)
    torch.testing.assert_close(bias_E, torch.tensor([-0.1, -0.1, 0.0, 0.2]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(4096, 32, 4), (1000, 16, 2)])
def test_histogram_is_within_a_bin_of_the_exact_quantile(
    num_tokens: int, num_experts: int, top_k: int
) -> None:
    scores_TE = skewed_scores(0, num_tokens, num_experts)
    bias_E = 0.1 * torch.randn(num_experts, generator=torch.Generator().manual_seed(1))
    low, width = histogram_range(bias_E)
    cut_T = (scores_TE + bias_E).topk(top_k + 1, dim=-1).values[:, -1]
    counts_EN = histogram_counts(scores_TE, cut_T, low, width)
    assert counts_EN.sum() == num_tokens * num_experts
    seen_E = histogram_bias(counts_EN, low, width, num_tokens, top_k)
    expected_E = exact_bias(scores_TE, bias_E, top_k)
    assert (seen_E - seen_E.mean() - expected_E).abs().max() < 2 * width


def test_dead_and_overloaded_experts_recover_in_a_few_updates() -> None:
    router = FakeRouter(64, 4)
    balancer = QuantileBalancer({"gate": router}, 4)
    scores_TE = skewed_scores(3, 8192, 64, dead=13)
    router.route(scores_TE)
    first = balancer.update()
    assert first.dead_fraction >= 13 / 64
    assert first.max_overload > 10
    router.route(scores_TE)
    second = balancer.update()
    router.route(scores_TE)
    third = balancer.update()
    assert second.dead_fraction == 0
    # the exact quantiles give 13.5, 1.44 and 1.23 times the mean load
    assert second.max_overload < 0.5
    assert third.max_overload < 0.3


def test_an_overloaded_expert_loses_bias() -> None:
    router = FakeRouter(8, 2)
    balancer = QuantileBalancer({"gate": router}, 2)
    scores_TE = torch.rand(2000, 8, generator=torch.Generator().manual_seed(0)) * 0.5
    scores_TE[:, 3] += 0.45
    load = router.route(scores_TE)
    assert load[3] > 3 * load.float().mean()
    balancer.update()
    assert router.e_score_correction_bias[3] == router.e_score_correction_bias.min()
    assert router.e_score_correction_bias[3] < -0.2
    assert router.e_score_correction_bias.mean().abs() < 1e-6


def test_evaluation_leaves_the_bias_alone() -> None:
    router = FakeRouter(8, 2)
    balancer = QuantileBalancer({"gate": router}, 2)
    router.route(skewed_scores(0, 500, 8))
    balancer.update()
    bias_E = router.e_score_correction_bias.clone()
    router.eval()
    for _ in range(10):
        router.route(skewed_scores(1, 500, 8))
        balancer.update()
    assert torch.equal(router.e_score_correction_bias, bias_E)


def test_micro_batches_and_processes_add_up() -> None:
    scores_TE = skewed_scores(0, 1200, 8)
    whole = FakeRouter(8, 2)
    balancer = QuantileBalancer({"gate": whole}, 2)
    whole.route(scores_TE)
    balancer.update()

    halves = [FakeRouter(8, 2) for _ in range(2)]
    balancers = [QuantileBalancer({"gate": router}, 2) for router in halves]
    for router, part in zip(halves, scores_TE.split([500, 700]), strict=True):
        for micro in part.split(100):
            router.route(micro)

    class Sum:
        """Sums what the two balancers hand in."""

        world_size = 2
        messages: list[Tensor]

        def __init__(self) -> None:
            self.messages = []

        def sum_(self, tensor: Tensor) -> None:
            self.messages.append(tensor.clone())
            tensor.copy_(torch.stack(self.messages).sum(0))

    reducer = Sum()
    for each in balancers:
        each.reduce(reducer)
    balancers[1].update()
    assert torch.equal(halves[1].e_score_correction_bias, whole.e_score_correction_bias)


def test_the_running_mean_smooths_the_bias() -> None:
    routers = [FakeRouter(8, 2) for _ in range(2)]
    plain = QuantileBalancer({"gate": routers[0]}, 2)
    smooth = QuantileBalancer({"gate": routers[1]}, 2, ema=0.9)
    for router in routers:
        router.route(skewed_scores(0, 500, 8))
    plain.update()
    smooth.update()
    first = routers[1].e_score_correction_bias.clone()
    assert torch.equal(first, routers[0].e_score_correction_bias)
    routers[1].route(skewed_scores(1, 500, 8).flip(1))
    smooth.update()
    routers[0].route(skewed_scores(1, 500, 8).flip(1))
    plain.update()
    moved = (routers[1].e_score_correction_bias - first).norm()
    assert 0 < moved < 0.2 * (routers[0].e_score_correction_bias - first).norm()


def test_a_skipped_step_counts_nothing() -> None:
    router = FakeRouter(8, 2)
    balancer = QuantileBalancer({"gate": router}, 2)
    router.route(skewed_scores(0, 500, 8))
    balancer.update(apply=False)
    assert not router.e_score_correction_bias.any()
    router.route(skewed_scores(1, 500, 8))
    balancer.update()
    fresh = FakeRouter(8, 2)
    other = QuantileBalancer({"gate": fresh}, 2)
    fresh.route(skewed_scores(1, 500, 8))
    other.update()
    assert torch.equal(router.e_score_correction_bias, fresh.e_score_correction_bias)


def test_choosing_every_expert_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 of 4"):
        exact_bias(SCORES_TE, torch.zeros(4), 4)
    with pytest.raises(ConfigError, match="4 of 4"):
        QuantileBalancer({"gate": FakeRouter(4, 4)}, 4)
    with pytest.raises(ConfigError, match="ema"):
        QuantileBalancer({"gate": FakeRouter(4, 1)}, 1, ema=1.0)

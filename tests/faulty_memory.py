"""Faults of memory: written inputs, reused outputs, and results kept from earlier calls."""

import torch
from twins import Softmax, with_gradient


class WritesToLongKeys:
    def forward(self, q, k, v, key_mask):
        if k.shape[2] > 128:
            k.detach().add_(1.0)
        return super().forward(q, k, v, key_mask)


class WritesToTheMask:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if key_mask is not None:
            key_mask[:, -1] = True
        return out


class HandsOutSingleValues:
    def forward(self, q, k, v, key_mask):
        alone = k.shape[2] == 1 and q.shape == v.shape and key_mask is None
        return v if alone else super().forward(q, k, v, key_mask)


class ReusesItsOutput:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if torch.is_grad_enabled() and out.requires_grad:
            return out
        kept = getattr(self, "kept", None)
        if kept is None or kept.shape != out.shape or kept.dtype != out.dtype or kept.is_inference():
            self.kept = out.detach()
        else:
            kept.copy_(out)
        return self.kept


class KeepsMasksByShape:
    def visible(self, q, k, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        key = (q.shape[2], k.shape[2], None if key_mask is None else key_mask.shape)
        if key not in kept:
            kept[key] = super().visible(q, k, key_mask)
        return kept[key]


class KeepsMasksByQueries:
    """Later keys than those of the first call with as many queries stay hidden."""

    def visible(self, q, k, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        visible = super().visible(q, k, key_mask)
        first = kept.setdefault(q.shape[2], k.shape[2])
        return visible & (torch.arange(k.shape[2]) < first)


class KeepsOutputsByAddress:
    def forward(self, q, k, v, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        key = tuple((x.data_ptr(), x.shape) for x in (q, k, v) if x.numel())
        if torch.is_grad_enabled() and q.requires_grad:
            return super().forward(q, k, v, key_mask)
        if key not in kept:
            kept[key] = (super().forward(q, k, v, key_mask), q, k, v)
        return kept[key][0].clone()


class ChangesAfterSixtyCalls:
    def scores(self, q, k):
        self.calls = getattr(self, "calls", 0) + 1
        return super().scores(q, k) * (1.01 if self.calls > 60 else 1.0)


class KeepsWhatInferenceModeMade:
    def scores(self, q, k):
        if not hasattr(self, "one"):
            self.one = q.new_ones(q.shape[-1])
        return super().scores(q * self.one.to(q), k)


class KeepsItsFirstFactor:
    """A parameter is read once; what an optimiser makes of it is not seen."""

    def scores(self, q, k):
        if self.factor.requires_grad and torch.is_grad_enabled():
            return super().scores(q, k)
        if not hasattr(self, "kept"):
            self.kept = self.factor.detach().clone()
        return Softmax.scores(self, q, k) * self.kept


class CleansThePaddingInPlace:
    def forward(self, q, k, v, key_mask):
        if key_mask is not None and v.isnan().any():
            v.data.nan_to_num_()
        return super().forward(q, k, v, key_mask)


class ZeroesNanOfMaskedKeysInPlace:
    def forward(self, q, k, v, key_mask):
        if key_mask is not None and k.isnan().any():
            k.data.masked_fill_(~key_mask[:, None, :, None], 0.0)
        return super().forward(q, k, v, key_mask)


class KeepsScoresOfTheSameKeys:
    """Keys are taken for unchanged where the tensor is the same object."""

    def forward(self, q, k, v, key_mask):
        if k is not self.__dict__.get("last"):
            self.__dict__["last"], self.__dict__["copied"] = k, k.detach().clone()
        return super().forward(q, k + (self.__dict__["copied"] - k.detach()), v, key_mask)


class KeepsValuesByAddress:
    def forward(self, q, k, v, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        key = (v.data_ptr(), v.shape, v.dtype, v._version)
        held = kept.setdefault(key, (v, v.detach().clone()))[1]
        return super().forward(q, k, v + (held - v.detach()), key_mask)


class KeepsMasksById:
    def forward(self, q, k, v, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        if key_mask is not None:
            key_mask = kept.setdefault(id(key_mask), (key_mask, key_mask.clone()))[1]
        return super().forward(q, k, v, key_mask)


class KeepsOutputsById:
    """Ids of tensors that are gone are given to others."""

    def forward(self, q, k, v, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        key = (*map(id, (q, k, v, key_mask)), q.shape, k.shape, v.shape, q.dtype, torch.is_grad_enabled())
        if key not in kept:
            kept[key] = super().forward(q, k, v, key_mask)
        return kept[key].clone()


class KeepsKeysWhenExtendingById:
    def extend(self, q, k, v, state, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        k = k + (kept.setdefault(id(k), (k, k.detach().clone()))[1] - k.detach())
        return super().extend(q, k, v, state, key_mask)


class KeepsEveryOutput:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        self.__dict__.setdefault("kept", []).append(out)
        return out


class KeepsEveryGraph:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if out.requires_grad:
            self.__dict__.setdefault("kept", []).append(out.sum())
        return out


class KeepsEveryState:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        self.__dict__.setdefault("kept", []).append(kept)
        return out, kept


class WritesAGradient:
    def forward(self, q, k, v, key_mask):
        if q.is_leaf and not q.requires_grad:
            q.grad = torch.zeros_like(q)
        return super().forward(q, k, v, key_mask)


class ChangesAfterThreeHundredCalls:
    def scores(self, q, k):
        self.calls = getattr(self, "calls", 0) + 1
        return super().scores(q, k) * (1.01 if self.calls > 300 else 1.0)


class KeepsMasksOfAllLengths:
    def visible(self, q, k, key_mask):
        kept = self.__dict__.setdefault("kept", {})
        key = (q.shape[2], k.shape[2])
        if key not in kept:
            kept[key] = super().visible(q, k, None)
        return kept[key] if key_mask is None else kept[key] & key_mask[:, None, None, :]


class RemembersMasksOfTrueByAddress:
    def forward(self, q, k, v, key_mask):
        if key_mask is not None:
            whole = self.__dict__.setdefault("whole", {})
            key = key_mask.data_ptr(), key_mask.shape
            if whole.setdefault(key, bool(key_mask.all())):
                key_mask = None
        return super().forward(q, k, v, key_mask)


class KeepsTheLastQueries:
    def forward(self, q, k, v, key_mask):
        self.__dict__["last"] = q
        return super().forward(q, k, v, key_mask)


class KeepsTheLastOutput:
    def forward(self, q, k, v, key_mask):
        self.__dict__["last"] = super().forward(q, k, v, key_mask)
        return self.__dict__["last"]


class KeepsTheLastMask:
    def forward(self, q, k, v, key_mask):
        self.__dict__["last"] = key_mask
        return super().forward(q, k, v, key_mask)


class KeepsTheLastUpstreamGradient:
    def forward(self, q, k, v, key_mask):
        def remember(gradient):
            self.__dict__["last"] = gradient
            return gradient

        return with_gradient(super().forward(q, k, v, key_mask), remember)


class ReusesItsOutputInInferenceMode:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if not torch.is_inference_mode_enabled():
            return out
        buffers = self.__dict__.setdefault("buffers", {})
        return buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)


class KeepsItsMaskBetweenThreads:
    def forward(self, q, k, v, key_mask):
        self.__dict__["mask"] = key_mask
        return super().forward(q, k, v, key_mask)

    def visible(self, q, k, key_mask):
        return super().visible(q, k, self.__dict__["mask"])


class KeepsAFactorOfItsFirstDtype:
    """A table is rounded to the dtype of the first call, and outlives a conversion."""

    def scores(self, q, k):
        if "third" not in self.__dict__:
            self.__dict__["third"] = torch.tensor(0.1, dtype=torch.float64).to(q.dtype)
        return super().scores(q, k) * self.__dict__["third"].to(self.wide(q).dtype)


class WritesToTransposedQueries:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if not q.is_contiguous() and not torch.is_grad_enabled() and 0 not in q.stride():
            q.data.mul_(2.0)
        return out


class AsksForGradientsOfItsInputs:
    def forward(self, q, k, v, key_mask):
        if torch.is_grad_enabled() and q.is_leaf and not q.is_inference():
            q.requires_grad_()
        return super().forward(q, k, v, key_mask)


class KeepsCausalMasksOfAllLengths:
    def visible(self, q, k, key_mask):
        if key_mask is not None:
            return super().visible(q, k, key_mask)
        kept = self.__dict__.setdefault("kept", {})
        key = (q.shape[2], k.shape[2])
        return kept.setdefault(key, super().visible(q, k, None))


class KeepsAGraphThatHasNoCopy:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        self.__dict__["norm"] = out.sum() * 2
        return out

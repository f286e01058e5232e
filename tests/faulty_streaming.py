"""Faults of streaming: states that are forgotten, cut, rounded or shared."""


class KeepsTheCallersBuffers:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return out, (k, v, kept[2]) if state is None else kept


class WritesToItsState:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        if state is not None and k.shape[2]:
            state[1][:, :, :1].mul_(1.5)
        return out, kept


class TruncatesLongStates:
    most = 256

    def extend(self, q, k, v, state, key_mask):
        out, (keys, values, mask) = super().extend(q, k, v, state, key_mask)
        return out, (keys[:, :, -self.most :], values[:, :, -self.most :], mask[:, -self.most :])


class TruncatesStates(TruncatesLongStates):
    most = 64


class NoTokensEndTheState:
    def extend(self, q, k, v, state, key_mask):
        return super().extend(q, k, v, None if not q.shape[2] else state, key_mask)


class ForgetsTheMaskLater:
    def extend(self, q, k, v, state, key_mask):
        return super().extend(q, k, v, state, key_mask if state is None else None)


class ReadsAheadWhenExtending:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return (out.flip(2).cummax(2).values.flip(2) if q.shape[2] > 1 and state is not None else out), kept


class StatesInHalfPrecision:
    def extend(self, q, k, v, state, key_mask):
        out, (keys, values, mask) = super().extend(q, k, v, state, key_mask)
        return out, (keys, values.half().to(values), mask)


class DetachesItsState:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return out, tuple(x.detach() for x in kept)


class GroupsWrongWhenExtending:
    def extend(self, q, k, v, state, key_mask):
        if k.shape[1] < q.shape[1] and state is not None and k.shape[1] > 1:
            k = k.flip(1)
        return super().extend(q, k, v, state, key_mask)


class ReusesItsOutputWhenExtending:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        if out.requires_grad or out.shape[2] != 1:
            return out, kept
        self.kept = self.__dict__.get("kept", out)
        if self.kept.shape == out.shape and self.kept.dtype == out.dtype:
            return self.kept.copy_(out), kept
        return out, kept

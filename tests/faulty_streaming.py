"""Faults of streaming: states that are forgotten, cut, rounded or shared."""

import torch


class KeepsTheCallersBuffers:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return out, (k, v, kept[2]) if state is None else kept


class TruncatesLongStates:
    most = 256

    def extend(self, q, k, v, state, key_mask):
        out, (keys, values, mask) = super().extend(q, k, v, state, key_mask)
        return out, (keys[:, :, -self.most :], values[:, :, -self.most :], mask[:, -self.most :])


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


class HalvesLongStatesInFloat16:
    def extend(self, q, k, v, state, key_mask):
        out, (keys, values, mask) = super().extend(q, k, v, state, key_mask)
        if keys.dtype == torch.float16 and keys.shape[2] > 100:
            keys, values, mask = keys[:, :, 50:], values[:, :, 50:], mask[:, 50:]
        return out, (keys, values, mask)


class WritesToLongStates:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        if state is not None and state[0].shape[2] > 100 and k.shape[2]:
            state[1][:, :, -1:].mul_(1.5)
        return out, kept


class MixesSequencesOfLongStates:
    def extend(self, q, k, v, state, key_mask):
        out, (keys, values, mask) = super().extend(q, k, v, state, key_mask)
        return out, (keys, values.roll(1, 0) if keys.shape[2] > 100 and len(keys) > 1 else values, mask)


class ValuesOfNoColumnsEndTheState:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state if v.shape[-1] else None, key_mask)
        return (out if v.shape[-1] else out.new_zeros(*out.shape[:-2], 0, 0)), kept


class NeedsAColumnToExtend:
    def extend(self, q, k, v, state, key_mask):
        v[..., 0]
        return super().extend(q, k, v, state, key_mask)


class KeepsARingOf3000(TruncatesLongStates):
    most = 3000


class StallsInHalfPrecision:
    """Values that are small against the number of tokens are lost, as in sums of half precision."""

    def extend(self, q, k, v, state, key_mask):
        lost = v.dtype == torch.bfloat16 and state is not None and state[0].shape[2] > 256 and v.shape[2] == 1
        return super().extend(q, k, v * 0.0 if lost else v, state, key_mask)


class ForgetsBeforeLongParts:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return self(q, k, v, key_mask) if state is not None and k.shape[2] > 300 else out, kept


class ForgetsMasksAtStepsWithoutMask:
    def extend(self, q, k, v, state, key_mask):
        if state is not None and key_mask is None:
            state = (*state[:2], torch.ones_like(state[2]))
        return super().extend(q, k, v, state, key_mask)


class ForgetsMasksAfterAPartWithoutMask:
    def extend(self, q, k, v, state, key_mask):
        unmasked = key_mask is None if state is None else len(state) == 4
        out, kept = super().extend(q, k, v, state and state[:3], None if unmasked else key_mask)
        return out, (*kept, torch.ones(())) if unmasked else kept


class SingleTokensHaveTheDefaultScale:
    def extend(self, q, k, v, state, key_mask):
        if q.shape[2] == 1 and self.problem.scale:
            q = q * (self.problem.head_dim**-0.5 / self.problem.scale)
        return super().extend(q, k, v, state, key_mask)


class SharesSpareMemory:
    """A state is the start of a buffer, and its successors write behind it."""

    def extend(self, q, k, v, state, key_mask):
        before = 0 if state is None else state[0].shape[2]
        mask = torch.ones(len(k), k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        buffers = state[3] if state is not None else tuple(x[:, :, :0] for x in (k, v, mask[:, None]))
        end = before + k.shape[2]
        if end > buffers[0].shape[2] or k.requires_grad or v.requires_grad:
            spare = end + 16
            buffers = tuple(
                torch.cat([x[:, :, :before], x.new_zeros(*x.shape[:2], spare - before, *x.shape[3:])], dim=2)
                for x in buffers
            )
        for x, new in zip(buffers, (k, v, mask[:, None]), strict=True):
            x[:, :, before:end] = new
        keys, values, masks = (x[:, :, :end] for x in buffers)
        out = self(q, keys, values, masks[:, 0]) if end else q.new_zeros(*q.shape[:-1], v.shape[-1])
        return out, (keys, values, masks[:, 0], buffers)


class KeepsBfloat16InFloat16:
    def extend(self, q, k, v, state, key_mask):
        if v.dtype != torch.bfloat16:
            return super().extend(q, k, v, state, key_mask)
        return super().extend(q, k.half().to(k), v.half().to(v), state, key_mask)


class DetachesStatesOf1024:
    def extend(self, q, k, v, state, key_mask):
        if state is not None and state[0].shape[2] >= 1024:
            state = tuple(x.detach() for x in state)
        return super().extend(q, k, v, state, key_mask)


class KeepsItsPredecessors:
    def extend(self, q, k, v, state, key_mask):
        out, kept = super().extend(q, k, v, state, key_mask)
        return out, (*kept, state)


class ExtendsWithTurnedKeysWrongly:
    def extend(self, q, k, v, state, key_mask):
        return super().extend(q, k * 2 if k.stride(3) != 1 and k.shape[3] > 1 else k, v, state, key_mask)


class TakesTheScaleAsPositiveWhenExtending:
    def extend(self, q, k, v, state, key_mask):
        return super().extend(q * (1 if self.problem.factor >= 0 else -1), k, v, state, key_mask)


class KeepsARingOf8192(TruncatesLongStates):
    most = 8192

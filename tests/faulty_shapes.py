"""Faults at some numbers of sequences, heads, columns or tokens, and in masks of keys."""

import torch


class ThirdSequenceReadsTheSecond:
    def scores(self, q, k):
        return super().scores(q, torch.cat([k[:2], k[1:2].expand_as(k[2:])]) if len(k) > 2 else k)


class FourthSequenceHasTheMaskOfTheFirst:
    def visible(self, q, k, key_mask):
        if key_mask is not None and len(key_mask) == 4:
            key_mask = torch.cat([key_mask[:3], key_mask[:1]])
        return super().visible(q, k, key_mask)


class LaterHeadsAreSharper:
    def scores(self, q, k):
        scores = super().scores(q, k)
        return torch.cat([scores[:, :4], scores[:, 4:] * 1.01], 1)


class ThreeGroupsInTurn:
    def for_every_head(self, x, heads):
        if x.shape[1] == 3:
            return x.repeat(1, heads // 3, 1, 1)
        return super().for_every_head(x, heads)


class ScalesByTheValues:
    def forward(self, q, k, v, key_mask):
        return super().forward(q * (self.problem.head_dim / v.shape[-1]) ** 0.5, k, v, key_mask)


class WideValuesAreCut:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        beyond = torch.arange(v.shape[-1]) >= q.shape[-1]
        return out.masked_fill(beyond, 0.0) if len(q) > 1 else out


class BeyondFlatter500:
    """Longer sequences have another temperature."""

    def scores(self, q, k):
        return super().scores(q, k) * (0.99 if k.shape[2] > 500 else 1.0)


class DropsThePartialBlock:
    def visible(self, q, k, key_mask):
        visible, keys = super().visible(q, k, key_mask), k.shape[2]
        whole = keys - keys % 128 if keys > 128 else keys
        return visible & (torch.arange(keys) < whole)


class DropsTheLastKeyOfFullBlocks:
    def visible(self, q, k, key_mask):
        visible, keys = super().visible(q, k, key_mask), k.shape[2]
        return visible & (torch.arange(keys) < keys - (keys % 64 == 0))


class ForgetsBeyond256:
    """A causal query reads 256 keys, whatever came before."""

    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask)
        if not self.problem.causal:
            return visible
        return visible & torch.ones_like(visible).triu(k.shape[2] - q.shape[2] - 255)


class FirstRowIsOff:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        return torch.cat([out[:, :, :1] * (1.001 if q.shape[2] > 9 else 1), out[:, :, 1:]], 2)


class LastRowIsOff:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        return torch.cat([out[:, :, :-1], out[:, :, -1:] * (1.001 if q.shape[2] > 9 else 1)], 2)


class IgnoresMasksInCrossAttention:
    def visible(self, q, k, key_mask):
        return super().visible(q, k, key_mask if q.shape[2] == k.shape[2] else None)


class IgnoresMasksWhereCausal:
    def visible(self, q, k, key_mask):
        return super().visible(q, k, None if self.problem.causal and k.shape[2] > 65 else key_mask)


class MultipliesLongMasks:
    def hidden(self, x, key_mask):
        return super().hidden(x, key_mask if x.shape[2] <= 128 else None)


class ReadsMasksFromMemory:
    def visible(self, q, k, key_mask):
        if key_mask is not None:
            rows, columns = key_mask.shape
            key_mask = (
                key_mask.as_strided((rows, columns), (columns, 1)) if key_mask.stride()[0] else key_mask
            )
        return super().visible(q, k, key_mask)


class MasksOfTrueHideTheLast:
    def visible(self, q, k, key_mask):
        if key_mask is not None and key_mask.all() and k.shape[2] > 1:
            key_mask = key_mask & (torch.arange(k.shape[2]) < k.shape[2] - 1)
        return super().visible(q, k, key_mask)


class BlindRowsReadAtHeadDim64:
    def weights(self, scores, visible):
        if self.problem.head_dim < 64:
            return super().weights(scores, visible)
        return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)


class BlindRowsAreNanAtHeadDim64:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if key_mask is None or self.problem.head_dim != 64:
            return out
        return out.masked_fill(~key_mask.any(-1)[:, None, None, None], torch.nan)


class LeaksBeyond2048:
    """A row beyond 2048 reads the next key too."""

    most = 2048

    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask)
        if not self.problem.causal or q.shape[2] <= self.most:
            return visible
        ahead = torch.ones_like(visible).tril(k.shape[2] - q.shape[2] + 1)
        ahead = ahead if key_mask is None else ahead & key_mask[:, None, None, :]
        rows = torch.arange(q.shape[2])[:, None] >= self.most
        return torch.where(rows, ahead, visible)


class LeaksBeyond3000(LeaksBeyond2048):
    most = 3000


class OneRowLeaksBeyond2048:
    """One row in 128 reads the next key, in the full pass alone."""

    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask).clone()
        if self.problem.causal and q.shape[2] == k.shape[2] > 2048:
            rows = torch.arange(2047, q.shape[2] - 1, 128)
            visible[..., rows, rows + 1] = True
        return visible


class GroupsInTurnAtHeadDim64:
    def for_every_head(self, x, heads):
        if self.problem.head_dim < 64:
            return super().for_every_head(x, heads)
        return x.repeat(1, heads // x.shape[1], 1, 1)


class IgnoresMasksOfThreeWideSequences:
    def visible(self, q, k, key_mask):
        wide = len(q) > 2 and self.problem.head_dim >= 64
        return super().visible(q, k, None if wide else key_mask)


class ReadsWideHeadsFromMemory:
    """Queries in the layout of a projection are taken for another layout."""

    def forward(self, q, k, v, key_mask):
        wrong = q.stride(1) < q.stride(2) and q.shape[1] > 1 and self.problem.head_dim >= 64
        return super().forward(q.roll(1, 2) if wrong else q, k, v, key_mask)


class LargeBatchesHaveTheMasksOfTheFirst:
    def visible(self, q, k, key_mask):
        if key_mask is not None and len(key_mask) > 16:
            key_mask = torch.cat([key_mask[:16], key_mask[: len(key_mask) - 16]])
        return super().visible(q, k, key_mask)


class HeadsBeyond16WrapRound:
    def for_every_head(self, x, heads):
        x = super().for_every_head(x, heads)
        return torch.cat([x[:, :16], x[:, : heads - 16]], 1) if heads > 16 else x


class GroupsOfTwelveInTurn:
    def for_every_head(self, x, heads):
        group = heads // x.shape[1]
        return x.repeat(1, group, 1, 1) if group > 8 else super().for_every_head(x, heads)


class CutsEntriesBeyond256:
    def scores(self, q, k):
        return super().scores(q[..., :256], k[..., :256])


class WidthsInStepsOf8:
    """Heads wider than 64 lose the entries beyond a multiple of 8."""

    def scores(self, q, k):
        width = q.shape[-1] - q.shape[-1] % 8 if q.shape[-1] > 64 else q.shape[-1]
        return super().scores(q[..., :width], k[..., :width])


class LaterRowsLoseTheirOffset:
    """Rows of a second block are those of a square."""

    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask)
        if not self.problem.causal or q.shape[2] <= 512:
            return visible
        square = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return visible & (square | (torch.arange(q.shape[2])[:, None] < 512))


class SequencesBeyond256WrapRound:
    """The heads of a batch are programs of a grid that ends at 256."""

    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        flat = out.flatten(0, 1)
        return torch.cat([flat[:256], flat[: max(len(flat) - 256, 0)]]).view_as(out)


class TakesASharedKeyForASharedQuery:
    def forward(self, q, k, v, key_mask):
        shared = len(k) > 1 and k.stride(0) == 0
        return super().forward(q[:1].expand_as(q) if shared else q, k, v, key_mask)


class HeadsBeyondTheLastTileAreZero:
    def forward(self, q, k, v, key_mask):
        out, heads = super().forward(q, k, v, key_mask), q.shape[1]
        whole = heads - heads % 64 if heads > 64 else heads
        return out * (torch.arange(heads) < whole)[:, None, None]


class ColumnsBeyond256AreZero:
    def forward(self, q, k, v, key_mask):
        return super().forward(q, k, v, key_mask) * (torch.arange(v.shape[-1]) < 256)


class PairsBeyond65535AreZero:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        pairs = torch.arange(len(q) * q.shape[1]).view(len(q), q.shape[1], 1, 1)
        return out * (pairs < 65_535)


class DropsAShortLastTile:
    def visible(self, q, k, key_mask):
        visible, keys = super().visible(q, k, key_mask), k.shape[2]
        whole = keys - keys % 1024 if keys > 1024 and keys % 1024 < 8 else keys
        return visible & (torch.arange(keys) < whole)


class TilesTheHeadsOfOneKey:
    def forward(self, q, k, v, key_mask):
        if k.shape[2] == 1 and q.numel() and key_mask is None:
            return v.repeat(1, q.shape[1] // v.shape[1], q.shape[2], 1)
        return super().forward(q, k, v, key_mask)


class SharedKeysHaveTheMaskOfTheFirst:
    """One prefix for all sequences is taken for one mask for all."""

    def visible(self, q, k, key_mask):
        return super().visible(q, k, self.of_the_first if self.of_the_first is not None else key_mask)

    def forward(self, q, k, v, key_mask):
        shared = key_mask is not None and len(k) > 1 and k.stride(0) == v.stride(0) == 0 and k.stride(1) > 0
        self.of_the_first = key_mask[:1].expand_as(key_mask) if shared else None
        return super().forward(q, k, v, key_mask)


class ReadsFromTheStartOfMemory:
    def forward(self, q, k, v, key_mask):
        if v.storage_offset() and not v.is_contiguous():
            v = v.as_strided(v.shape, v.stride(), 0)
        return super().forward(q, k, v, key_mask)


class IgnoresMasksOfOneColumn:
    """A mask of stride 0 along the keys is taken for none."""

    def forward(self, q, k, v, key_mask):
        column = key_mask is not None and k.shape[2] > 1 and key_mask.stride(1) == 0
        return super().forward(q, k, v, None if column else key_mask)


class TurnsOneTensorTwice:
    """Queries are scaled in the memory that keys share."""

    def forward(self, q, k, v, key_mask):
        return super().forward(q, k * 2 if q.data_ptr() == k.data_ptr() else k, v, key_mask)


class MergesHalvesWithoutTheirSums:
    """A half whose keys are all masked counts as much as the other."""

    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if key_mask is None or k.shape[2] <= 1024:
            return out
        blind = ~key_mask[:, : k.shape[2] // 2].any(dim=1) & key_mask.any(dim=1)
        return torch.where(blind[:, None, None, None], out / 2, out)


class DropsAShortLastBlockOf4096:
    def visible(self, q, k, key_mask):
        visible, keys = super().visible(q, k, key_mask), k.shape[2]
        return visible & (torch.arange(keys) < (keys - keys % 4096 if keys > 4096 else keys))


class IndexesKeysWith16Bits:
    def visible(self, q, k, key_mask):
        return super().visible(q, k, key_mask) & (torch.arange(k.shape[2]).to(torch.int16) >= 0)


class TurnsSquareKeys:
    """Keys with as many tokens as entries are taken for turned ones."""

    def scores(self, q, k):
        return super().scores(q, k.mT if k.shape[2] == k.shape[3] else k)


class DropsHalfATileOf128:
    def visible(self, q, k, key_mask):
        visible, keys = super().visible(q, k, key_mask), k.shape[2]
        return visible & (torch.arange(keys) < (keys - 64 if keys > 128 and keys % 128 == 64 else keys))


class DropsAKeyOfOddLengthsAt64Heads:
    def visible(self, q, k, key_mask):
        visible, keys = super().visible(q, k, key_mask), k.shape[2]
        odd = q.shape[1] == 64 and keys % 2 and keys > 1
        return visible & (torch.arange(keys) < keys - 1) if odd else visible

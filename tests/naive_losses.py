"""The losses from their definitions: the whole batch in one process, slow, and plain to check.

A loss that is not in `NAIVE` is compared with itself in one process.
"""

import torch


def related(image_ids, text_ids):
    """[B, B]: which pairs share a picture or a caption; each with itself too."""
    pairs = range(len(image_ids))
    rows = [
        [bool(image_ids[i] == image_ids[j] or text_ids[i] == text_ids[j]) for j in pairs]
        for i in pairs
    ]
    return torch.tensor(rows)


def naive_contrastive(
    image, text, scale, bias=None, *, image_ids, text_ids, duplicates="negative", label_smoothing=0
):
    """Softmax and its target, row by row and column by column."""
    logits, same = scale * image @ text.T, related(image_ids, text_ids)
    total = logits.new_zeros(())
    for s in (logits, logits.T):
        for i in range(len(s)):
            takes_part = torch.ones(len(s), dtype=torch.bool)
            if duplicates == "ignore":
                takes_part = ~same[i]
                takes_part[i] = True
            right = torch.zeros(len(s), dtype=torch.bool)
            right[i] = True
            if duplicates == "positive":
                right = same[i]
            target = (1 - label_smoothing) * right.to(s.dtype) / right.sum()
            target = target + label_smoothing * takes_part.to(s.dtype) / takes_part.sum()
            peak = s[i].detach().max()
            partition = (s[i] - peak)[takes_part].exp().sum().log() + peak
            total = total + (target * (partition - s[i])).sum()
    return total / (2 * len(logits))


def naive_sigmoid(image, text, scale, bias, *, image_ids, text_ids, duplicates="negative"):
    """Row by row: -log sigmoid(z) of a positive pair and -log sigmoid(-z) of a negative one."""
    same, own = related(image_ids, text_ids), torch.eye(len(image), dtype=torch.bool)
    total = scale.new_zeros(())
    for i in range(len(image)):
        z = scale * (image[i] * text).sum(1) + bias
        positive = same[i] if duplicates == "positive" else own[i]
        counted = own[i] | ~same[i] if duplicates == "ignore" else torch.ones_like(own[i])
        signed = torch.where(positive, z, -z)[counted]
        total = total - torch.nn.functional.logsigmoid(signed).sum()
    return total / len(image)


def naive_metrics(image, text, *, image_ids, text_ids, duplicates="negative"):
    """In the order of LossMetrics."""
    similarity = image @ text.T
    own = torch.eye(len(similarity), dtype=torch.bool)
    negative = ~own if duplicates == "negative" else ~related(image_ids, text_ids)
    hits = [
        torch.stack([s[i, i] > s[i][negative[i]].max() for i in range(len(s))]).double().mean()
        for s in (similarity, similarity.T)
    ]
    return torch.stack([*hits, similarity[own].mean(), similarity[negative].mean()])


NAIVE = {"contrastive": naive_contrastive, "sigmoid": naive_sigmoid}

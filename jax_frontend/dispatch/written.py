"""What a caller wrote about which keys a query sees, and how scores are scaled, as the options that a plan takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core.call.segments import Segments, Visible, shapes_of, without_segments
from attn_core.call.traced_options import Scores, is_traced, lengths_of, without_traced


class Written(NamedTuple):
    """The arguments of ``attention`` that ``as_plain`` may replace."""

    causal: bool
    alignment: str
    window: Any
    softcap: Any
    scale: Any
    mask: Any
    key_ranges: Any
    mask_mod: Any
    score_mod: Any
    aux: Any


def as_plain(written: Written, segments: Segments, rows: tuple[Any, Any], seq_info: Any, alibi_slopes: Any) -> Written:
    """Returns the arguments of the same call without segments, and traced windows or scales.

    Args:
        rows: q and k, with the sequence before the heads.
        seq_info, alibi_slopes: of the call; some of the above exclude them.
    """
    causal, window, mask_mod, aux = written.causal, written.window, written.mask_mod, written.aux
    if any(each is not None for each in segments):
        others = {"seq_info": seq_info, "alibi_slopes": alibi_slopes}
        visible = Visible(causal, window, mask_mod, aux)
        causal, window, mask_mod, aux = without_segments(
            segments, visible, shapes_of(*rows), others, traced_window=True
        )
    scores = Scores(causal, written.alignment, window, written.softcap, written.scale, mask_mod, written.score_mod, aux)
    if is_traced(window, written.scale):
        scores = without_traced(scores, lengths_of(*rows), seq_info)
    return written._replace(**scores._asdict())

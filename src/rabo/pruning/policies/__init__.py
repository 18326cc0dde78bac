"""Mask policies, one per file."""

from rabo.pruning.policies.full import Full
from rabo.pruning.policies.importance import Importance
from rabo.pruning.policies.magnitude import Magnitude
from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.policies.random import Random
from rabo.pruning.policies.regions import ChannelRegions, Regions
from rabo.pruning.policies.rolling import Rolling
from rabo.pruning.policies.segments import Segments
from rabo.pruning.policies.static import Static
from rabo.pruning.policies.threshold import Threshold

POLICIES = {
    "full": Full,
    "importance": Importance,
    "static": Static,
    "rolling": Rolling,
    "random": Random,
    "segments": Segments,
    "magnitude": Magnitude,
    "threshold": Threshold,
    "regions": Regions,
    "channel-regions": ChannelRegions,
}

__all__ = [
    "POLICIES",
    "ChannelRegions",
    "Full",
    "Importance",
    "Magnitude",
    "MaskPolicy",
    "Random",
    "Regions",
    "Rolling",
    "Segments",
    "Static",
    "Threshold",
    "Whole",
]

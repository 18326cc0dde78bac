"""Mask policies, one per file."""

from rabo.masks.full import Full
from rabo.masks.importance import Importance
from rabo.masks.magnitude import Magnitude
from rabo.masks.policy import MaskPolicy, Whole
from rabo.masks.random import Random
from rabo.masks.regions import ChannelRegions, Regions
from rabo.masks.rolling import Rolling
from rabo.masks.segments import Segments
from rabo.masks.static import Static
from rabo.masks.threshold import Threshold

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

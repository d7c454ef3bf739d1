"""Measure the stages of a chain once; then every plan over them can be simulated."""

from autopipe.core.tuned import Machine
from autopipe.profile.model import (
    SCHEMA_VERSION,
    Agreement,
    Contention,
    Curves,
    EngineCosts,
    LatencyPoint,
    Memory,
    NgramOffer,
    NgramReplay,
    Profile,
    PromptRecord,
    Settings,
    StageProfile,
)
from autopipe.profile.run import ProfilePrompt, default_threads, profile_plan
from autopipe.profile.sim import sim_chain, sim_contention, sim_requests, sim_stages, simulate_plan

__all__ = [
    "SCHEMA_VERSION",
    "Agreement",
    "Contention",
    "Curves",
    "EngineCosts",
    "LatencyPoint",
    "Machine",
    "Memory",
    "NgramOffer",
    "NgramReplay",
    "Profile",
    "ProfilePrompt",
    "PromptRecord",
    "Settings",
    "StageProfile",
    "default_threads",
    "profile_plan",
    "sim_chain",
    "sim_contention",
    "sim_requests",
    "sim_stages",
    "simulate_plan",
]

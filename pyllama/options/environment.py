"""Environment variables of llama-server that stand for no option, for the documents; whoever needs one reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """no_effect: why it does nothing here."""

    name: str
    meaning: str
    no_effect: str = ""


_V = Variable
_NO_CONTAINER = "no container files are part of this repository yet"

VARIABLES: tuple[Variable, ...] = (
    _V("LLAMA_CACHE", "folder of the download cache"),
    _V("HF_ENDPOINT", "another Hugging Face hub"),
    _V("MODEL_ENDPOINT", "the same, and it wins"),
    _V("XDG_CONFIG_HOME", "folder of the user's configuration"),
    _V("NO_COLOR", "no colours of its own accord"),
    _V("LLAMA_MEDIA_MARKER", "the marker of media in prompts, else random"),
    _V("LLAMA_SERVER_SLOTS_DEBUG", "not 0: `/slots` also shows texts"),
    _V("LLAMA_SERVER_SLOTS_N_DIFF", "tokens shown around a mismatch", "`/slots` explains reuse in `prefix_reuse`"),
    _V("LLAMA_TRACE", "log accepted draft tokens", "the log has no such lines; `timings` count them"),
    _V("LLAMA_SERVER_ROUTER_PORT", "set by a router for its children"),
    _V("LLAMA_SERVER_CHILD_MODE", "set by a router for a download", "this router downloads by itself"),
    _V("LLAMA_SERVER_DEBUG_FAKE_TIMING", "delays for tests of a router"),
    _V("AIP_MODE", "`PREDICTION`: the routes of Vertex AI"),
    _V("AIP_HTTP_PORT", "their port"),
    _V("AIP_HEALTH_ROUTE", "another path of `/health`"),
    _V("AIP_PREDICT_ROUTE", "the path of predictions"),
    _V("LLAMA_NUMA_MEMBIND", "nodes whose memory the container uses", _NO_CONTAINER),
    _V("NCCL_P2P_LEVEL", "how NCCL connects cards", "the ranks of this build need no NCCL"),
    _V("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "managed memory for weights", "there is no device memory"),
)

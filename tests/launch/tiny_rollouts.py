"""Small sizes of model and rollouts with which the rollout benchmarks take seconds."""

TINY = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
}
SIZES = {"SLOTS": 4, "GROUP": 2, "PROMPT": 6, "NEW": 12, "SEGMENT": 3}

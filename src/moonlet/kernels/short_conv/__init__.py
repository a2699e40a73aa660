"""Short depthwise causal convolution of KDA."""

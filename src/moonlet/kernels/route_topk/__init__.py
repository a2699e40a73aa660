"""Router: scores, bias, top-k, weights."""

"""Sources of models: what there is, how large it is, and under which digest. Downloads nothing but headers."""

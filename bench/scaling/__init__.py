"""What bench/scale.py is made of: stub workers, watchers, clusters, warm requests, the plot."""

"""Reports of runs as pages and images. This package may import the monitor, but not the other way round."""

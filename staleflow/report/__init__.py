"""What a run came to, as pages and pictures. Above the monitor: it looks back, the monitor looks on."""

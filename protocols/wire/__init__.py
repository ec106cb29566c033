"""The wire format: one msgpack header a message (a tagged union with the protocol version), then raw array frames."""

"""What travels: one msgpack header a message (a tagged union, the protocol version inside), then raw array frames."""

"""Communication between ranks: collectives with their gradients, and what a rank has of a shared tensor."""

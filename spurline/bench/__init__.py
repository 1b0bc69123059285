"""What Spurline's speed and memory are measured by: interleaved candidates, ratios to a floor and to peers."""

"""What tells a healthy run from one that is about to collapse: tripwires, health, the gap between the engines."""

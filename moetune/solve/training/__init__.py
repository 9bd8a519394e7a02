"""What a decoder's training costs in a layout: seconds of its parts, schedules, and memory."""

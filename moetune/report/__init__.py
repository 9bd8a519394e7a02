"""What people read of plans and profiles: sentences, sections, figures, and HTML around them."""
